"""Headers of shared libraries of Linux, macOS and Windows: what tests ask of them."""

import struct
from dataclasses import dataclass, field

MACHINES = {62: "x86-64", 183: "aarch64", 0x01000007: "x86-64", 0x0100000C: "aarch64"}
PE_MACHINES = {0x8664: "x86-64", 0xAA64: "aarch64"}


@dataclass
class Binary:
    """What the headers of a library say."""

    kind: str  # elf, mach-o or pe
    architecture: str
    exported: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)
    libraries: set[str] = field(default_factory=set)  # that it loads
    text_relocations: bool = False
    executable_stack: bool = False
    alignment: int = 0  # of segments
    minimum_system: str = ""
    signed: bool = False
    timestamp: int = 0


def read_binary(code: bytes) -> Binary:
    """Read the headers of a library."""
    if code[:4] == b"\x7fELF":
        return read_elf(code)
    if code[:4] == b"\xcf\xfa\xed\xfe":
        return read_mach_o(code)
    if code[:2] == b"MZ":
        return read_pe(code)
    raise ValueError(f"unknown format (got {code[:4]!r})")


def read_text(code: bytes, at: int) -> str:
    """Return the text that ends with a zero byte."""
    return code[at : code.index(b"\0", at)].decode()


# ---- Linux -------------------------------------------------------------------


def read_elf(code: bytes) -> Binary:
    """Read an ELF library."""
    (machine,) = struct.unpack_from("<H", code, 18)
    found = Binary("elf", MACHINES[machine])
    programs_at, sections_at = struct.unpack_from("<QQ", code, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<4H", code, 54)
    for index in range(programs):
        kind, flags, _, _, _, _, _, align = struct.unpack_from(
            "<IIQQQQQQ", code, programs_at + index * program_size
        )
        if kind == 1:  # PT_LOAD
            found.alignment = max(found.alignment, align)
        found.executable_stack |= kind == 0x6474E551 and bool(flags & 1)
    table = [struct.unpack_from("<IIQQQQIIQQ", code, sections_at + n * section_size) for n in range(sections)]
    for section in table:
        _, kind, _, _, start, size, link, _, _, _ = section
        if kind == 11:  # SHT_DYNSYM
            for at in range(start + 24, start + size, 24):
                name, _, _, place = struct.unpack_from("<IBBH", code, at)
                symbols = found.exported if place else found.undefined
                symbols.add(read_text(code, table[link][4] + name))
        if kind == 6:  # SHT_DYNAMIC
            for at in range(start, start + size, 16):
                tag, value = struct.unpack_from("<qQ", code, at)
                found.text_relocations |= tag == 22 or (tag == 30 and bool(value & 4))
                if tag == 1:  # DT_NEEDED
                    found.libraries.add(read_text(code, table[link][4] + value))
    return found


# ---- macOS -------------------------------------------------------------------


def read_mach_o(code: bytes) -> Binary:
    """Read a Mach-O library."""
    (machine,) = struct.unpack_from("<I", code, 4)
    commands, _, flags = struct.unpack_from("<III", code, 16)
    found = Binary("mach-o", MACHINES[machine])
    found.executable_stack = bool(flags & 0x20000)
    at = 32
    for _ in range(commands):
        command, size = struct.unpack_from("<II", code, at)
        if command == 0x2:  # LC_SYMTAB
            _read_mach_symbols(code, at, found)
        elif command == 0xC:  # LC_LOAD_DYLIB
            found.libraries.add(read_text(code, at + struct.unpack_from("<I", code, at + 8)[0]))
        elif command == 0x32:  # LC_BUILD_VERSION
            (version,) = struct.unpack_from("<I", code, at + 12)
            found.minimum_system = f"{version >> 16}.{version >> 8 & 255}"
        elif command == 0x1D:  # LC_CODE_SIGNATURE
            (place,) = struct.unpack_from("<I", code, at + 8)
            found.signed = code[place : place + 4] == b"\xfa\xde\x0c\xc0"
        at += size
    return found


def _read_mach_symbols(code: bytes, at: int, found: Binary) -> None:
    symbols, count, texts, _ = struct.unpack_from("<IIII", code, at + 8)
    for index in range(count):
        name, kind, _, _, _ = struct.unpack_from("<IBBHQ", code, symbols + 16 * index)
        if kind & 0xE0 or not kind & 1:  # of a debugger, or not external
            continue
        text = read_text(code, texts + name).removeprefix("_")
        (found.exported if kind & 0xE else found.undefined).add(text)


# ---- Windows -----------------------------------------------------------------


def read_pe(code: bytes) -> Binary:
    """Read a PE library."""
    (start,) = struct.unpack_from("<I", code, 60)
    machine, sections, timestamp, _, _, optional_size, _ = struct.unpack_from("<HHIIIHH", code, start + 4)
    optional = start + 24
    found = Binary("pe", PE_MACHINES[machine], timestamp=timestamp)
    (found.alignment,) = struct.unpack_from("<I", code, optional + 32)
    major, minor = struct.unpack_from("<HH", code, optional + 48)
    found.minimum_system = f"{major}.{minor}"
    found.executable_stack = not struct.unpack_from("<H", code, optional + 70)[0] & 0x100  # NX_COMPAT
    table = [
        struct.unpack_from("<IIII", code, optional + optional_size + 40 * n + 8) for n in range(sections)
    ]

    def place_of(address: int) -> int:
        for virtual_size, virtual, size, place in table:
            if virtual <= address < virtual + max(virtual_size, size):
                return address - virtual + place
        raise ValueError(f"no section has the address (got {address})")

    exports, _, imports, _ = struct.unpack_from("<IIII", code, optional + 112)
    if exports:
        at = place_of(exports)
        names, _, names_at = struct.unpack_from("<III", code, at + 24)
        for index in range(names):
            (name,) = struct.unpack_from("<I", code, place_of(names_at) + 4 * index)
            found.exported.add(read_text(code, place_of(name)))
    at = place_of(imports) if imports else 0
    while at and any(fields := struct.unpack_from("<5I", code, at)):
        found.libraries.add(read_text(code, place_of(fields[3])))
        entry = place_of(fields[0] or fields[4])
        while value := struct.unpack_from("<Q", code, entry)[0]:
            found.undefined.add(read_text(code, place_of(value) + 2))
            entry += 8
        at += 20
    return found
