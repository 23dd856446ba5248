"""Sets up Numba to emit object files for a class of processors that need nothing of Numba when they run.

They may be for another operating system and architecture than this one (platform/systems.py). What Numba
takes from its host is then replaced: the triple, the data layout, and the machine that emits code.
"""

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, codegen, config
from numba.core.registry import cpu_target

from llamatrain.platform import cpu
from llamatrain.platform.systems import host_platform, target_platform


class Library(codegen.AOTCodeLibrary):
    """Code that is linked into other code and optimized only there."""

    def _optimize_final_module(self) -> None:
        pass

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: nothing runs where it is compiled."""
        return 0


class Codegen(codegen.AOTCPUCodegen):
    """Emits code for the processor class of this process."""

    _library_class = Library

    def _customize_tm_features(self) -> str:
        here = cpu.processor()
        return str(llvm.get_host_cpu_features().flatten()) if here.cpu == cpu.HOST else here.features

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: our functions have no environment."""

    def optimize(self, module: Any) -> None:
        """Run Numba's passes over a complete module."""
        for options in (
            {
                "loop_vectorize": self._loopvect,
                "slp_vectorize": False,
                "opt": self._opt_level,
                "cost": "cheap",
            },
            {},
        ):
            passes, builder = self._module_pass_manager(**options)
            passes.run(module, builder)

    def emit_object(self, module: Any) -> bytes:
        """Return the object file of a module."""
        return bytes(self._tm.emit_object(module))


class CrossCodegen(Codegen):
    """Emits code for another platform, which this process cannot run."""

    def __init__(self, module_name: str, cpu_name: str, triple: str) -> None:
        self.triple = triple
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        super().__init__(module_name, cpu_name)

    def _init(self, llvm_module: Any) -> None:
        options = {"opt": config.OPT}
        self._tm_features = self._customize_tm_features()
        self._customize_tm_options(options)
        self._tm = llvm.Target.from_triple(self.triple).create_target_machine(**options)
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._engine = None  # nothing runs here
        self._loopvect, self._opt_level = (True, 3) if config.OPT.is_opt_max else (False, 0)

    def _create_empty_module(self, name: str) -> Any:
        module = ir.Module(cgutils.normalize_ir_text(name))
        module.triple = self.triple
        if self._data_layout:
            module.data_layout = self._data_layout
        return module


@cache
def numba_context() -> Any:
    """Return Numba's target context, which from now on emits code for the class of this process."""
    context = cpu_target.target_context
    # Addresses are integers here. Sinking one into a loop, LLVM may take the wrong summand for its pointer, find that it is 0
    # for the caller (whose code it sees later), and drop the code as undefined: seen in a decoder. So it shall not do that.
    llvm.set_option("", "-addr-sink-using-gep=false")
    config.LLVM_REFPRUNE_PASS = 0  # there is no reference counting
    context._internal_codegen = make_codegen()
    return context


def make_codegen() -> Codegen:
    """Return what emits code for the class and the platform of this process."""
    target = target_platform()
    if target and target != host_platform():
        return CrossCodegen("llamatrain", cpu.processor().cpu, target.triple)
    return Codegen("llamatrain", cpu.processor().cpu)


def typing_context() -> Any:
    """Return Numba's typing context."""
    return cpu_target.typing_context
