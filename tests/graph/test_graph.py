"""Graphs that cannot be, and what is said of them; printing, checking, and graphs too deep for recursion."""

import itertools
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrain.engine.plan import plan
from llamatrain.engine.program import Program
from llamatrain.engine.schedule import order_nodes
from llamatrain.errors import GraphError
from llamatrain.graph import ops as O
from llamatrain.graph.autodiff import gradients, value_and_gradients
from llamatrain.graph.printing import as_dot, as_text, verify
from llamatrain.graph.remat import recompute
from llamatrain.graph.tensor import (
    BF16,
    F32,
    F64,
    I32,
    OPS,
    DynamicDim,
    Node,
    Op,
    Spec,
    Tensor,
    collect_nodes,
    gradient,
    parameter,
    placeholder,
)
from llamatrain.kernels.reference import KERNELS
from tests.graph.test_gradients import scalar
from tests.helpers.op_cases import CASES, PAIRS, Case, chosen
from tests.helpers.random_models import TINY, llama

# ---- what does not fit -----------------------------------------------------


def x(*shape: int, dtype=F32, name: str = "x") -> Tensor:
    return placeholder(name, shape, dtype)


MISFITS = {
    "add": lambda: O.add(x(2, 3), x(4), name="here"),
    "mul": lambda: O.mul(x(3), x(3, dtype=F64), name="here"),
    "add1": lambda: O.add1(x(3), x(2), name="here"),
    "log": lambda: O.log(x(3, dtype=I32), name="here"),
    "sum_rows": lambda: O.sum_rows(x(), name="here"),
    "mean": lambda: O.mean(x(0), name="here"),
    "cast": lambda: O.cast(x(3, dtype=I32), dtype=F32, name="here"),
    "repeat": lambda: O.repeat(x(2, 3), shape=(4, 7), name="here"),
    "repeat_back": lambda: O.repeat_back(x(4, 7), shape=(2, 3), name="here"),
    "matmul": lambda: O.matmul(x(2, 3), x(5, 4), name="here"),
    "matmul_nn": lambda: O.matmul_nn(x(2, 3), x(2, 3), name="here"),
    "out_prod": lambda: O.out_prod(x(2, 3), x(4, 3), name="here"),
    "reshape": lambda: O.reshape(x(2, 3), shape=(7,), name="here"),
    "permute": lambda: O.permute(x(2, 3), axes=(0, 0), name="here"),
    "view": lambda: O.view(x(2, 3), slices=((0, 3, 1), (0, 3, 1)), name="here"),
    "cpy": lambda: O.cpy(x(2), x(3), name="here"),
    "acc": lambda: O.acc(x(4), x(3), slices=((0, 4, 1),), name="here"),
    "set": lambda: O.set(x(4), x(4, dtype=F64), slices=((0, 4, 1),), name="here"),
    "get_rows": lambda: O.get_rows(x(4, 2), x(3), name="here"),
    "get_rows_back": lambda: O.get_rows_back(x(4, 2), x(3, dtype=I32), rows=5, name="here"),
    "set_rows": lambda: O.set_rows(x(4, 2), x(1, 2), x(2, dtype=I32), name="here"),
    "diag": lambda: O.diag(x(2, 2), name="here"),
    "diag_mask_inf": lambda: O.diag_mask_inf(x(2), name="here"),
    "rms_norm": lambda: O.rms_norm(x(2, 3), x(2), eps=1e-5, name="here"),
    "layer_norm": lambda: O.layer_norm(x(2, 3), x(3), x(2), eps=1e-5, name="here"),
    "swiglu": lambda: O.swiglu(x(2), x(1), name="here"),
    "rope": lambda: O.rope(x(1, 2, 3, 4), x(1, 2), x(9, 2, 2), name="here"),
    "soft_max": lambda: O.soft_max(x(), name="here"),
    "flash_attn": lambda: O.flash_attn(
        x(1, 2, 3, 4), x(1, 2, 2, 4), x(1, 2, 2, 4), x(1, 2, dtype=I32), scale=1.0, name="here"
    ),
    "cross_entropy_loss": lambda: O.cross_entropy_loss(x(2, 3), x(3, dtype=I32), x(2), name="here"),
    "linear_cross_entropy": lambda: O.linear_cross_entropy(
        x(2, 3), x(5, 4), x(2, dtype=I32), x(2), name="here"
    ),
    "linear_cross_entropy, cap": lambda: O.linear_cross_entropy(
        x(2, 3), x(5, 3), x(2, dtype=I32), x(2), cap=-1.0, name="here"
    ),
    "matmul, bias": lambda: O.matmul(x(2, 3), x(5, 3), x(3), name="here"),
    "matmul, bias of another type": lambda: O.matmul(x(2, 3), x(5, 3), x(5, dtype=BF16), name="here"),
    "softcap": lambda: O.softcap(x(2), cap=0.0, name="here"),
    "softcap_back": lambda: O.softcap_back(x(2), x(3), cap=1.0, name="here"),
    "geglu": lambda: O.geglu(x(2), x(2, dtype=BF16), name="here"),
    "geglu_back": lambda: O.geglu_back(x(3), x(2), x(2), name="here"),
    "reglu": lambda: O.reglu(x(2), x(2, dtype=BF16), name="here"),
    "reglu_back": lambda: O.reglu_back(x(3), x(2), x(2), name="here"),
    "swiglu_halves": lambda: O.swiglu_halves(x(2, 3), name="here"),
    "swiglu_halves_back": lambda: O.swiglu_halves_back(x(2, 4), x(2, 4), name="here"),
    "split_columns": lambda: O.split_columns(x(2, 5), sizes=(2, 2), name="here"),
    "split_columns, none": lambda: O.split_columns(x(2, 5), sizes=(5, 0), name="here"),
    "join_columns": lambda: O.join_columns(x(2, 5), x(3, 5), name="here"),
    "rope, halves": lambda: O.rope(x(1, 2, 3, 8), x(1, 2, dtype=I32), x(9, 3, 2), halves=True, name="here"),
    "flash_attn, window": lambda: attention(window=-1),
    "flash_attn, cap": lambda: attention(cap=float("nan")),
}


def attention(**how: float) -> Tensor:
    q = x(1, 2, 4, 4)
    return O.flash_attn(q, q, q, x(1, 2, dtype=I32), scale=1.0, name="here", **how)


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_names_op_shapes_and_node(case: str) -> None:
    with pytest.raises(GraphError) as failed:
        MISFITS[case]()
    message = str(failed.value)
    assert message.startswith(f"{case.split(',')[0]} (here): ")
    assert "(got x f32[" in message or "(got x i32[" in message or "(got x f64[" in message
    assert "\n" not in message


def test_every_source_is_shown_with_shape_and_dtype() -> None:
    with pytest.raises(
        GraphError, match=r"matmul: 3 does not match 4 .got tokens f32\[2, 3\], w bf16\[5, 4\]"
    ):
        O.matmul(x(2, 3, name="tokens"), x(5, 4, name="w", dtype=BF16))


SHAPES = ((), (1,), (3,), (2, 2), (1, 3), (2, 1, 2), (1, 2, 2, 2))


JUDGING = {  # no gradient goes through them, and they are part of none
    "cross_entropy_judged": lambda c: O.cross_entropy_judged(
        c.x(2, 3, fixed=True), c.ids([2, -1]), c.x(2, fixed=True)
    )[0],
    "linear_cross_entropy_judged": lambda c: O.linear_cross_entropy_judged(
        c.x(2, 3, fixed=True), c.x(4, 3, fixed=True), c.ids([3, 0]), c.x(2, fixed=True)
    )[0],
    "detached": lambda c: O.detached(c.x(2, 3, fixed=True)),
    "causal_conv_step": lambda c: O.causal_conv_step(
        c.x(1, 2, 3, fixed=True), c.x(1, 4, 3, fixed=True), c.x(3, 3, fixed=True)
    )[1],
    "gated_delta_step": lambda c: O.gated_delta_step(
        c.x(1, 2, 2, 3, fixed=True),
        *(c.x(1, 4, 1, 2, fixed=True) for _ in range(2)),
        c.x(1, 4, 2, 3, fixed=True),
        *(c.x(1, 4, 2, fixed=True) for _ in range(2)),
    )[1],
    "matmul_add": lambda c: O.matmul_add(c.x(3, 4, fixed=True), c.x(3, 5, fixed=True), c.x(4, 5, fixed=True)),
    "matmul_nn_add": lambda c: O.matmul_nn_add(
        c.x(3, 4, fixed=True), c.x(3, 5, fixed=True), c.x(5, 4, fixed=True)
    ),
    "top_k": lambda c: O.take_columns(
        c.x(2, 6, fixed=True), O.top_k(c.x(2, 6, fixed=True), k=2, groups=3, groups_used=2)
    ),
    "matmul_int8": lambda c: O.matmul_int8(c.x(3, 5, fixed=True), c.x(4, 5, fixed=True), c.x(4, fixed=True)),
    "matmul_nn_int8": lambda c: O.matmul_nn_int8(c.x(3, 4, fixed=True), c.x(4, 5, fixed=True)),
    "expert_matmul_int8": lambda c: O.expert_matmul_int8(
        c.x(5, 3, fixed=True), c.x(4, 2, 3, fixed=True), *chosen(c, PAIRS, 4)
    ),
    "expert_matmul_nn_int8": lambda c: O.expert_matmul_nn_int8(
        c.x(5, 2, 3, fixed=True), c.x(4, 3, 2, fixed=True), *chosen(c, PAIRS, 4)
    ),
    "fake_quantize": lambda c: O.fake_quantize(c.x(3, 64), kind="Q8_0"),
}


@cache
def all_sound_nodes() -> dict[str, list[Node]]:
    """Return nodes of the cases of all ops and of their gradients, by the name of their op."""
    found: dict[str, list[Node]] = defaultdict(list)
    for makes in (CASES | {name: [make] for name, make in JUDGING.items()}).values():
        for make in makes:
            case = Case(dtype=F32)
            loss = scalar(case, make(case))
            for node in collect_nodes([loss, *gradients(loss, case.wrt)]):
                found[node.op.name].append(node)
    return found


def sound_nodes(name: str) -> list[Node]:
    """Return some nodes of the op."""
    return all_sound_nodes()[name][:12]


def applied(node: Node, place: int, source: Tensor) -> Node | None:
    """The node with another source, or None if that is a graph's error, as it should be."""
    sources = (*node.sources[:place], source, *node.sources[place + 1 :])
    try:
        return Node(node.op, sources, node.attrs)
    except GraphError:
        return None


WITH_GRADIENTS = [name for name, op in OPS.items() if not name.startswith(("opt_", "clip"))]


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_any_source_makes_a_graph_error_or_what_the_kernel_gives(name: str) -> None:
    nodes = sound_nodes(name)
    assert nodes
    for node in nodes:
        for place, shape, dtype in itertools.product(range(len(node.sources)), SHAPES, (F32, F64, I32)):
            again = applied(node, place, x(*shape, dtype=dtype))
            if again is None or node.op.layout:
                continue
            with np.errstate(all="ignore"):
                arrays = [np.zeros(source.shape, source.dtype.numpy) for source in again.sources]
                results = KERNELS[name](*arrays, **node.attrs)
            results = results if isinstance(results, tuple) else (results,)
            assert [np.shape(each) for each in results] == [out.shape for out in again.outputs], again


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_other_sources_of_the_same_specs_need_no_shape_rule(name: str) -> None:
    for node in sound_nodes(name):
        others = tuple(Tensor(source.spec, source.role) for source in node.sources)
        again = node.with_sources(others)
        assert again.sources == others
        assert all(new.spec is old.spec for new, old in zip(again.outputs, node.outputs, strict=True))
        inferred = Node(node.op, others, node.attrs, rounded=node.rounded)
        assert [output.spec for output in again.outputs] == [output.spec for output in inferred.outputs]


def test_a_dynamic_axis_differs_from_its_length() -> None:
    """A rule passes on that an axis is dynamic, so equal lengths are not enough to keep the specs."""
    node = O.silu(x(DynamicDim(64, 16), 8)).node
    fixed = node.with_sources((x(64, 8),)).outputs[0]
    assert fixed.shape == node.outputs[0].shape
    assert isinstance(node.outputs[0].shape[0], DynamicDim) and not isinstance(fixed.shape[0], DynamicDim)


def test_rows_need_an_axis() -> None:
    with pytest.raises(GraphError, match="get_rows_back"):
        O.get_rows_back(x(), x(dtype=I32), rows=3)


# ---- gradients that cannot be ----------------------------------------------


def test_an_op_without_gradient_on_the_path_is_named() -> None:
    w = parameter("w", (2, 3))
    dx = O.cross_entropy_loss_back(x(), w, x(2, dtype=I32), x(2), name="bent")
    with pytest.raises(GraphError, match=r"bent = cross_entropy_loss_back\(x, w, x, x\).*a gradient itself"):
        gradients(O.sum(dx), [w])


def test_an_op_without_gradient_off_the_path_is_fine() -> None:
    w = parameter("w", (2, 3))
    bent = O.cross_entropy_loss_back(x(), x(2, 3), x(2, dtype=I32), x(2))
    (dw,) = gradients(O.sum(O.mul(w, bent)), [w])
    assert dw.shape == w.shape


def test_no_gradient_goes_through_the_optimizer_or_lse() -> None:
    q, k, v, starts = x(1, 2, 1, 2), parameter("k", (1, 2, 1, 2)), x(1, 2, 1, 2), x(1, 2, dtype=I32)
    _, lse = O.flash_attn(q, k, v, starts, scale=1.0, name="attention")
    with pytest.raises(GraphError, match=r"attention = flash_attn.*lse"):
        gradients(O.sum(lse), [k])
    factor, _ = O.clip_factor(O.sum_sqr(k), limit=1.0)
    with pytest.raises(GraphError, match=r"clip_factor.*optimizer"):
        gradients(factor, [k])


def test_a_rule_with_too_few_gradients_is_named() -> None:
    def halves(a: Spec, b: Spec) -> Spec:
        return a

    bad = Op(halves)
    gradient(bad)(lambda node, dy: (dy,))
    w = parameter("w", (2,))
    with pytest.raises(GraphError, match="halves returned 1 gradients for 2 sources"):
        gradients(O.sum(bad(w, w)), [w])


def test_a_loss_is_one_number() -> None:
    w = parameter("w", (2,))
    with pytest.raises(GraphError, match=r"one number.*f32\[2\]"):
        gradients(O.sqr(w), [w])


def test_a_parameter_that_the_loss_does_not_reach_is_named() -> None:
    w, other = parameter("w", (2,)), parameter("blk.3.lost", (4,))
    with pytest.raises(GraphError, match=r"does not depend on blk.3.lost f32\[4\]"):
        gradients(O.sum(w), [w, other])


def test_a_targets_gradient_cannot_be_had() -> None:
    targets = placeholder("targets", (2, 3))
    loss = O.cross_entropy_loss(x(2, 3), targets, x(2))
    with pytest.raises(GraphError, match=r"cross_entropy_loss.*targets"):
        gradients(loss, [targets])


# ---- gradients that can ----------------------------------------------------


@pytest.mark.parametrize(
    ("f", "derivative"),
    [
        (lambda a: O.mul(a, a), lambda a: 2 * a),
        (lambda a: O.add(a, a), lambda a: 2 + 0 * a),
        (lambda a: O.sub(a, a), lambda a: 0 * a),
        (lambda a: O.div(a, a), lambda a: 0 * a),
        (lambda a: O.mul(O.mul(a, a), a), lambda a: 3 * a * a),
        (lambda a: O.matmul(a, a), lambda a: 2 * a.sum(axis=0) + 0 * a),
    ],
)
def test_a_tensor_that_is_a_source_twice(f, derivative) -> None:
    w, values = parameter("w", (3, 4), F64), np.random.default_rng(0).standard_normal((3, 4))
    loss = O.sum(f(w))
    program = Program.build([loss, *gradients(loss, [w])], {w: values}, kernels="reference")
    program()
    np.testing.assert_allclose(program.read(gradients_of(program)), derivative(values), atol=1e-12)


def gradients_of(program: Program) -> Tensor:
    return list(program.plan.outputs)[1]


def test_the_gradient_of_a_value_that_is_read_in_three_places() -> None:
    w = parameter("w", (4,), F64)
    h = O.sqr(w)
    loss = O.add(O.sum(h), O.add(O.sum(O.scale(h, by=2.0)), O.sum_sqr(w)))
    (dw,) = gradients(loss, [w])
    program = Program.build([dw], {w: np.arange(4.0)}, kernels="reference")
    program()
    np.testing.assert_array_equal(program.read(dw), 8.0 * np.arange(4.0))


def test_a_gradient_with_respect_to_a_value_inside() -> None:
    w = x(4, dtype=F64)
    h = O.sqr(w)
    dh, dw = gradients(O.sum_sqr(h), [h, w])
    program = Program.build([dh, dw], {w: np.arange(4.0)}, kernels="reference")
    program()
    np.testing.assert_array_equal(program.read(dh), 2 * np.arange(4.0) ** 2)
    np.testing.assert_array_equal(program.read(dw), 4 * np.arange(4.0) ** 3)


def test_a_loss_that_is_a_parameter() -> None:
    w = parameter("w", ())
    (dw,) = gradients(w, [w])
    program = Program.build([dw], {}, kernels="reference")
    program()
    assert program.read(dw) == 1


# ---- the verifier ----------------------------------------------------------


def made() -> tuple[Tensor, Tensor, Node]:
    w = parameter("w", (2, 3))
    h = O.silu(w, name="gate")
    loss = O.sum(h)
    return w, loss, h.node


def test_a_sound_graph_passes() -> None:
    model = llama(TINY)
    value, grads = value_and_gradients(model.loss, model.trained)
    verify([value, *grads])
    verify(recompute([value, *grads], [model.loss], model.block_inputs))


def tamper_shape(node: Node) -> None:
    node.outputs[0].spec = Spec((3, 3), node.outputs[0].dtype)


def tamper_dtype(node: Node) -> None:
    node.outputs[0].spec = Spec(node.outputs[0].shape, F64)


def tamper_source(node: Node) -> None:
    node.sources = (parameter("other", (3, 2)),)


def tamper_serial(node: Node) -> None:
    node.sources = (O.silu(node.sources[0]),)


def tamper_output(node: Node) -> None:
    node.outputs = (Tensor(node.outputs[0].spec, "value", "gate", node),)


@pytest.mark.parametrize("tamper", [tamper_shape, tamper_dtype, tamper_source, tamper_serial, tamper_output])
def test_a_tampered_graph_is_caught(tamper) -> None:
    _, loss, node = made()
    tamper(node)
    with pytest.raises(GraphError, match="gate"):
        verify([loss])


def test_memory_is_changed_by_one_node_alone() -> None:
    s, y = parameter("s", (2, 2)), x(2, 2)
    changes = [O.cpy(s, y, into=True), O.cpy(s, y, into=True)]
    with pytest.raises(GraphError, match=r"s f32\[2, 2\] is changed by"):
        verify(changes)
    verify([O.cpy(O.cpy(s, y, into=True), y, into=True)])


def test_a_change_that_waits_for_itself() -> None:
    s = parameter("s", (2,))
    changed = O.cpy(s, x(2), into=True)
    with pytest.raises(GraphError, match="waits for itself"):
        plan([O.add(changed, O.mul(s, changed))])


# ---- for people to look at -------------------------------------------------


def test_the_graph_as_text() -> None:
    w, loss, node = made()
    lines = as_text([loss]).splitlines()
    assert lines[0] == f"parameter {w.name}: f32[2, 3]"
    assert lines[1] == f"%{node.serial}: f32[2, 3] = silu(w)  # gate"
    assert lines[2] == f"%{loss.node.serial}: f32[] = sum(%{node.serial})"
    assert lines[3] == f"gives %{loss.node.serial}"


def test_text_and_dot_have_every_node() -> None:
    model = llama(TINY)
    value, grads = value_and_gradients(model.loss, model.trained)
    outputs = [value, *grads]
    text, dot = as_text(outputs), as_dot(outputs)
    assert dot.startswith("digraph {") and dot.endswith("}")
    for node in collect_nodes(outputs):
        assert f"%{node.serial}" in text and node.op.name in text
        assert f'"%{node.serial}" [' in dot
        for source in node.sources:
            start = f"%{source.node.serial}" if source.node else source.name
            assert f'"{start}" -> "%{node.serial}"' in dot
    for weight in model.trained:
        assert f"{weight.name}: f32{list(weight.shape)}" in text
        assert f'"{weight.name}" [' in dot


# ---- depth -----------------------------------------------------------------

DEEP = 20_000


def chain(length: int) -> tuple[Tensor, Tensor]:
    w = parameter("w", (2,))
    h = w
    for _ in range(length):
        h = O.scale(h, by=1.0)
    return w, O.sum(h)


def test_a_graph_20000_nodes_deep() -> None:
    w, loss = chain(DEEP)
    assert len(collect_nodes([loss])) == DEEP + 1
    assert len(order_nodes([loss])) == len(order_nodes([loss], left_to_right=False)) == DEEP + 1
    grads = gradients(loss, [w])
    again = recompute([loss, *grads], [loss], [])
    verify(again)
    laid = plan(again)
    assert len(laid.nodes) >= 2 * DEEP
    assert laid.arena <= 64 * 8


def test_a_program_10000_nodes_deep() -> None:
    _, loss = chain(DEEP // 5)
    program = Program.build([loss], {}, kernels="reference")
    program()
    assert program.read(loss) == 0
    assert as_dot([loss]).count("\n") > DEEP // 5 < as_text([loss]).count("\n")


@settings(deadline=None, max_examples=5)
@given(st.integers(2000, 4000))
def test_deep_chains_of_views_and_of_changes(length: int) -> None:
    seen, cache = parameter("w", (2, 3)), parameter("cache", (2, 3))
    for _ in range(length):
        seen = O.transpose(seen)
    laid = plan([O.cpy(cache, seen if seen.shape == (2, 3) else O.transpose(seen), into=True)])
    assert laid.arena <= 64
    for _ in range(length // 4):
        cache = (
            O.scale(O.cpy(cache, x(2, 3), into=True), by=2.0) if _ == 0 else O.cpy(cache, x(2, 3), into=True)
        )
    assert plan([cache]).arena == 64
