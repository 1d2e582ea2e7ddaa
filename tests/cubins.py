"""What is in machine code of a GPU: registers and stack by its ELF sections, instructions by NVIDIA's disassembler."""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

DISASSEMBLER = "nvidia-cuda-nvdisasm"
SYMBOL_TABLE = 2  # type of a section
WITH_SIZE, REGISTERS, FRAME_BYTES = 4, 0x2F, 0x11  # of attributes in .nv.info: with a size of their own; which they are
BRANCH = re.compile(r"BRA.*`\((\.L_\w+)\)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass
class Kernel:
    registers: int
    frame_bytes: int
    instructions: Counter[str] = field(default_factory=Counter[str])
    loops: list[Counter[str]] = field(default_factory=list[Counter[str]])  # bodies, with those of loops in them

    def count(self, *parts: str) -> int:
        """Instructions whose name has all of these between its dots."""
        return sum(count for name, count in self.instructions.items() if {*parts} <= {*name.split(".")})


def kernels_of(cubin: Path) -> dict[str, Kernel]:
    found = {name: Kernel(*sizes) for name, sizes in _sizes(cubin.read_bytes()).items()}
    wheel = metadata.distribution(DISASSEMBLER)
    command = [str(wheel.locate_file("nvidia/cu13/bin/nvdisasm")), "-c", str(cubin)]
    kernel, names, labels = None, list[str](), dict[str, int]()
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if heading := re.match(r"\.text\.(\w+):", line):
            kernel, names, labels = found[heading[1]], [], {}
        elif label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(names)
        elif kernel and (instruction := INSTRUCTION.search(line)):
            names.append(instruction[1])
            kernel.instructions[instruction[1]] += 1
            target = BRANCH.search(line)
            if target and labels.get(target[1], len(names)) < len(names) - 1:
                kernel.loops.append(Counter(names[labels[target[1]] :]))
    return found


def _sizes(elf: bytes) -> dict[str, tuple[int, int]]:
    """Registers of a thread and bytes of its stack frame, by kernel."""
    (start,), (count, names_at) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HH", elf, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, start + 64 * index) for index in range(count)]

    def text(section: int, offset: int) -> str:
        first = sections[section][4] + offset
        return elf[first : elf.index(b"\0", first)].decode()

    symbols = next(section for section in sections if section[1] == SYMBOL_TABLE)
    (information,) = (section for section in sections if text(names_at, section[0]) == ".nv.info")
    by_attribute: dict[int, dict[str, int]] = {REGISTERS: {}, FRAME_BYTES: {}}
    for attribute, value in _attributes(elf[information[4] : information[4] + information[5]]):
        if attribute in by_attribute:
            index, size = struct.unpack("<II", value)
            (name,) = struct.unpack_from("<I", elf, symbols[4] + 24 * index)
            by_attribute[attribute][text(symbols[6], name)] = size
    return {name: (size, by_attribute[FRAME_BYTES][name]) for name, size in by_attribute[REGISTERS].items()}


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        kind, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if kind == WITH_SIZE:
            yield attribute, content[at : at + size]
            at += size
