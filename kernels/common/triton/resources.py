"""Registers, spills, shared memory and instructions of every kernel on every target, compared with a budget.

    python -m tritoncaps.kernels.common.triton.resources           compare with resources.json
    python -m tritoncaps.kernels.common.triton.resources --write   compile every kernel and write it
    ... --any-compiler                                             compile only, with another version of Triton

Kernels are compiled ahead of time, so no GPU is needed; but not under TRITON_INTERPRET=1. resources.json also has a
fingerprint of the code that it describes. If the code is still the same, the comparison compiles a sample.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from tritoncaps.kernels.common.triton.compiling import uncoalesced
from tritoncaps.kernels.common.triton.instructions import nest
from tritoncaps.kernels.common.triton.launching import OPTIONS, REGISTERS
from tritoncaps.kernels.dynamic.triton import config as dynamic_config
from tritoncaps.kernels.mixture.triton import config

BUDGET = Path(__file__).with_name("resources.json")
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SHAPE = (32, 32)  # child and parent types of dynamic routing
STORAGES = {"fp16": "float16", "bf16": "bfloat16"}  # types of inputs for which kernels compute in float32
POSES = ("p_poses", "p_weight", "p_weight_of", "p_offset")
ITERATIONS = ("p_statistics", "p_slopes", "p_log_sums", "p_da")
INPUTS = (
    *("p_poses", "p_weight", "p_activations", "p_votes", "p_assignments", "p_grad_assignments", "p_grad_votes"),
    *("p_weights", "p_left", "p_dV"),
)
SLACK = 1.1  # a kernel may need this factor more than its budget
SAMPLE = 16  # every so many kernels are compiled if the code is that of the budget
FORBIDDEN = ("stack", "spills", "divisions", "strided")

INDICES = (
    *("children", "weight_of", "parents_start", "group_child", "group_start"),
    *("pair_child", "pair_parent", "pair_slot", "weight_start"),
)


class Variant(NamedTuple):
    """One specialisation of a kernel: its constant arguments, the pointers that are None, warps and types."""

    module: str
    kernel: str
    options: dict[str, Any]
    absent: tuple[str, ...]
    num_warps: int
    dtype: str = "fp32"
    storage: str = "fp32"  # of the inputs

    def needs_coalescing(self, lanes: int) -> bool:
        """Whether a launch compiles this variant with Triton's coalescing pass."""
        if not self.module.startswith("mixture") or "BB" not in self.options:
            return True
        tile = config.Tile(self.options["BN"], self.options["BB"], self.num_warps)
        return config.needs_coalescing(self.kernel, tile, lanes)

    @property
    def name(self) -> str:
        options = self.options
        words = [self.kernel.removesuffix("_kernel")]
        words += [options["WEIGHTS"]] if "WEIGHTS" in options else []
        words += ["of any fit"] if options.get("ANY_FIT") else []
        words += ["local"] if options.get("LOCAL") else []
        words += ["by type"] if options.get("BY_TYPE") else []
        words += ["of outputs"] if self.kernel == "slopes_kernel" and "p_moments" in self.absent else []
        words += ["of the last iteration"] if options.get("ALL") is False and "p_dV" in self.absent else []
        words += ["of stored votes"] if {"p_poses", "p_slopes"} & set(self.absent) and "WEIGHTS" not in options else []
        words += [f"{options['B']}->{options['C']}"] if "B" in options else []
        words += [f"of {options['D']}->{options['E']}"] if "D" in options else []
        words += [f"without {name.removeprefix('p_')}" for name in ("p_q", "p_g") if name in self.absent]
        words += ["in float64"] if self.dtype == "fp64" else []
        words += [f"of {STORAGES[self.storage]}"] if self.storage in STORAGES else []
        return " ".join(words)


def variants(target: str) -> Iterator[Variant]:
    """Every kernel with every tile that `choose` returns, in float32 and float64.

    Other variants need almost the same on all targets, so each is compiled for one target: float16 inputs with local
    competition (sm_80), gradients of only the last iteration and gradients of any fit (sm_90), bfloat16 inputs and
    competition over positions (sm_100).
    """
    lanes = TARGETS[target][2]
    chosen, double = (config.choose(16, 9, *SHAPE, 9, 144, is_double, lanes) for is_double in (False, True))
    for tiles, dtype in ((chosen, "fp32"), (double, "fp64")):
        kernels = (*_routing_variants(tiles), *_stored_variants(tiles), *_parent_variants())
        for variant in (*kernels, *_dynamic_variants(dynamic_config.SIZES, dtype == "fp64")):
            yield variant._replace(dtype=dtype, storage=dtype)
    if target == "sm_80":
        half = config.choose(16, 9, *SHAPE, 9, 144, False, lanes, half=True)
        for variant in (*_routing_variants(half, LOCAL=True), *_stored_variants(half)):
            yield variant._replace(storage="fp16")
    if target == "sm_90":
        yield from _gradient_variants(chosen, ALL=False)
        yield from _any_fit_variants(chosen)
    if target == "sm_100":
        for variant in _stored_variants(chosen):
            yield variant._replace(storage="bf16")
        yield from _routing_variants(chosen, BY_TYPE=True)
        names = ("log_sum_kernel", "edge_product_kernel", "assignment_kernel", "e_step_gradient_kernel")
        yield from (variant for variant in _stored_variants(chosen, BY_TYPE=True) if variant.kernel in names)


def _routing_variants(chosen: Any, **competition: Any) -> Iterator[Variant]:
    """The views that compute votes. ``competition``: LOCAL or BY_TYPE."""
    absent = {
        "uniform": ("p_statistics", "p_slopes", "p_log_sum", "p_da"),
        "assignment": ("p_slopes", "p_da"),
        "gradient": (),
    }
    for weights, names in absent.items():
        options = {"LOCAL": False, "WEIGHTS": weights, "H": 16, "COUNT": 16, **competition}
        names, tile = ("p_votes", "p_weights", *names), chosen.parent if weights == "gradient" else chosen.forward
        yield _variant("mixture.triton.parent_view", "parent_view_kernel", tile, names, **options)
    yield from _gradient_variants(chosen, **competition)
    by_type: dict[str, Any] = {"BY_TYPE": competition.get("BY_TYPE", False)}
    yield _variant("mixture.triton.child_view", "log_sum_kernel", chosen.child, ("p_votes",), H=16, **by_type)
    yield _variant("mixture.triton.child_view", "assignment_gradient_kernel", chosen.child, **by_type)


def _any_fit_variants(chosen: Any) -> Iterator[Variant]:
    """The gradients of any fit, whose mean need not be the mean of the votes."""
    options = {"WEIGHTS": "gradient", "LOCAL": False, "H": 16, "COUNT": 16, "ANY_FIT": True}
    absent = ("p_votes", "p_weights")
    yield _variant("mixture.triton.parent_view", "parent_view_kernel", chosen.parent, absent, **options)
    yield _variant("mixture.triton.child_view", "assignment_gradient_kernel", chosen.child, ANY_FIT=True)
    yield from _gradient_variants(chosen, ANY_FIT=True)


def _gradient_variants(chosen: Any, **given: bool) -> Iterator[Variant]:
    """The gradients of children and weight, at the end of the backward pass."""
    options = {"LOCAL": False, "ALL": True, **given}
    yield _variant("mixture.triton.child_view", "child_gradient_kernel", chosen.gradient, ("p_dV",), **options)
    yield _variant("mixture.triton.weight_view", "weight_view_kernel", chosen.gradient, ("p_dV",), **options)


def _stored_variants(chosen: Any, BY_TYPE: bool = False) -> Iterator[Variant]:
    """The views and the edge view of stored votes."""
    absent = {"stored assignment": ("p_statistics",), "stored gradient": ("p_activations",)}
    options: dict[str, Any]
    for weights, more in absent.items():
        options = {"WEIGHTS": weights, "LOCAL": False, "H": 16, "COUNT": 16}
        names = (*POSES, "p_slopes", "p_log_sum", "p_da", *more)
        yield _variant("mixture.triton.parent_view", "parent_view_kernel", chosen.parent, names, **options)
    options = {"BY_TYPE": BY_TYPE}
    yield _variant(
        "mixture.triton.child_view", "log_sum_kernel", chosen.child, (*POSES, "p_activations"), H=16, **options
    )
    yield _variant("mixture.triton.child_view", "edge_product_kernel", chosen.child, **options)
    options = {"LOCAL": False, "ALL": False}
    yield _variant("mixture.triton.child_view", "child_gradient_kernel", chosen.stored, ITERATIONS, **options)
    yield _variant("mixture.triton.weight_view", "weight_view_kernel", chosen.stored, ITERATIONS, **options)
    for kernel in ("pose_votes", "coordinate_addition", "assignment", "m_step_gradient", "e_step_gradient"):
        options = {"DTYPE": None, "H": 16, "LOCAL": False, "BY_TYPE": BY_TYPE}
        yield _variant("mixture.triton.edge_view", f"{kernel}_kernel", chosen.stored, **options)


def _parent_variants() -> Iterator[Variant]:
    """The kernels over parents, and the sum of the splits of the weight's gradient."""
    options = {"H": 16, "LEAST_SUPPORT": 1e-34, "BLOCK": config.PARENTS}
    given = ("p_grad_mean", "p_grad_variance", "p_grad_logit", "p_grad_activation")
    outputs = ("p_moments", "p_grad_variance", "p_grad_logit")
    names = ("fit", "outputs", "moments", "component_gradients", "components", "slopes_of_moments")
    for name, absent in (*((name, ()) for name in names), ("slopes", given), ("slopes", outputs)):
        yield Variant("mixture.triton.parents", f"{name}_kernel", options, absent, config.PARENT_WARPS)
    options = {"BLOCK_SPLITS": config.ADDED_SPLITS, "BLOCK": config.NUMBERS}
    yield Variant("mixture.triton.weight_view", "add_splits_kernel", options, (), 4)


def _dynamic_variants(vectors: tuple[int, ...], double: bool) -> Iterator[Variant]:
    """The views of dynamic routing with priors, also without the arguments that the first iterations do not have; and
    squash."""
    from tritoncaps.kernels.dynamic.triton.squash import tile as squash_tile

    for E in vectors:
        chosen = dynamic_config.choose(16, 9, *SHAPE, 8, E, 9, 144, double)
        sizes = {"B": SHAPE[0], "C": SHAPE[1], "D": 8, "E": E}
        tile, weight_tile = chosen.tile._asdict(), chosen.weight_tile._asdict()
        warps = tile.pop("num_warps"), weight_tile.pop("num_warps")
        options = {**sizes, **tile}
        first = (("p_q", "p_g", "p_mean"), ("p_g", "p_mean")) if not double and dynamic_config.SIZES[0] == E else ()
        for absent in (*first, ()):
            yield Variant(
                "dynamic.triton.views", "dynamic_parent_view_kernel", {**options, "LOCAL": False}, absent, warps[0]
            )
            yield Variant(
                "dynamic.triton.views", "dynamic_child_view_kernel", {**options, "RIVAL": True}, absent, warps[0]
            )
        options = {**sizes, "LOCAL": False, "VARIABLE": True}
        rows = {"BD": dynamic_config.NUMBERS}
        yield Variant(
            "dynamic.triton.views", "dynamic_child_gradient_kernel", {**options, **tile, **rows}, (), warps[0]
        )
        options = {**options, **weight_tile, "BD": dynamic_config.ROWS}
        yield Variant("dynamic.triton.views", "dynamic_weight_view_kernel", options, (), warps[1])
        yield Variant("dynamic.triton.squash", "squash_kernel", {"D": 8, **squash_tile(E)}, (), 4)
        yield Variant("dynamic.triton.squash", "squash_gradient_kernel", {"D": 8, **squash_tile(E)}, (), 4)


def measure(variant: Variant, target: str) -> dict[str, Any]:
    """Compile a variant for a target and read its resources from the compiled code."""
    compiled = compile_variant(variant, target, variant.needs_coalescing(TARGETS[target][2]))
    usage = _amd_usage(compiled.asm["amdgcn"]) if target.startswith("gfx") else _nvidia_usage(compiled.asm["cubin"])
    contiguous = 0 if variant.module.endswith("parents") else -1  # axis of a tile
    return {
        **usage,
        **_habits(compiled.asm, contiguous),
        "shared": compiled.metadata.shared,
        "warps": variant.num_warps,
    }


def compile_variant(variant: Variant, target: str, coalescing: bool) -> Any:
    """Compile a variant with the options of a launch, with or without Triton's coalescing pass."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    limits = {} if target.startswith("gfx") else {"maxnreg": REGISTERS}
    options = {"num_warps": variant.num_warps, "enable_fp_fusion": True, **limits}
    with nullcontext() if coalescing else uncoalesced():
        return triton.compile(ASTSource(**_signature(variant)), target=GPUTarget(*TARGETS[target]), options=options)


def report(target: str, step: int = 1) -> dict[str, dict[str, Any]]:
    """What the first of every ``step`` variants needs on a target."""
    return {variant.name: measure(variant, target) for variant in list(variants(target))[::step]}


def budget() -> dict[str, dict[str, dict[str, Any]]]:
    """What resources.json allows, by target and by name of a variant."""
    return {target: record["kernels"] for target, record in json.loads(BUDGET.read_text()).items()}


def fingerprint(target: str) -> str:
    """A hash of what determines the machine code: the version of Triton, the variants, the device code and its
    constants, and this file, which compiles them."""
    import triton

    files = sorted(Path(__file__).parents[2].glob("*/triton/*.py"))
    sources = [text for text in (file.read_text() for file in files) if "triton.jit" in text or "constexpr" in text]
    code = [triton.__version__, without_docstrings(Path(__file__).read_text()), repr(OPTIONS)]
    code += [f"{x} {x.needs_coalescing(TARGETS[target][2])}" for x in variants(target)]
    code += [without_docstrings(source, device_only=True) for source in sources]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()


def without_docstrings(source: str, device_only: bool = False) -> str:
    """The code of a file, without comments too. ``device_only``: Triton's functions, constants, fields of classes."""
    module = ast.parse(source)
    for node in ast.walk(module):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        if ast.get_docstring(node) is not None:
            del node.body[0]
        if device_only and not isinstance(node, ast.FunctionDef):
            node.body = [part for part in node.body if not _is_host_code(part)]
    return ast.unparse(module)


def _is_host_code(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return "triton.jit" not in "".join(map(ast.unparse, node.decorator_list))
    return isinstance(node, (ast.Import, ast.ImportFrom))


def compare(target: str) -> tuple[list[str], int]:
    """The complaints about the kernels of a target, and the number of kernels that were compiled: a sample, if
    resources.json is of the same code. Then the compiler must give the same numbers."""
    record = json.loads(BUDGET.read_text()).get(target, {"fingerprint": "", "kernels": {}})
    allowed = record["kernels"]
    if record["fingerprint"] != fingerprint(target):
        needs = report(target)
        return complaints(target, needs, allowed), len(needs)
    sample = report(target, SAMPLE)
    found = [f"{target} {name}: not as in resources.json" for name, usage in sample.items() if usage != allowed[name]]
    return found + complaints(target, allowed, allowed), len(sample)


def complaints(target: str, needs: dict[str, Any], allowed: dict[str, Any]) -> list[str]:
    """A line for each variant that has no budget, exceeds its budget, spills, divides in a loop or loads strided."""
    found = []
    for name, usage in needs.items():
        if name not in allowed:
            found.append(f"{target} {name}: no budget")
            continue
        limits = {key: allowed[name][key] for key in ("registers", "shared", "instructions")}
        limits |= dict.fromkeys(FORBIDDEN, 0)
        found += [
            f"{target} {name}: {key} is {usage[key]}, the budget {limit}"
            for key, limit in limits.items()
            if usage[key] > SLACK * limit
        ]
    return found


def write(targets: list[str]) -> None:
    """Compile the kernels of these targets and write what they need."""
    records = json.loads(BUDGET.read_text())
    for target in targets:
        records[target] = {"fingerprint": fingerprint(target), "kernels": report(target)}
    part = BUDGET.with_suffix(".part")
    part.write_text(json.dumps(records, indent=1) + "\n")
    part.replace(BUDGET)


def compile_only(targets: list[str]) -> None:
    """Compile all kernels with a Triton that has no budget, and name those that spill registers."""
    import triton

    for target in targets:
        needs = report(target)
        spilling = [name for name, usage in needs.items() if usage["stack"] or usage["spills"]]
        print(f"{target}: {len(needs)} kernels compiled by Triton {triton.__version__}; {len(spilling)} need a stack")
        print("".join(f"  {name}\n" for name in spilling), end="")


def _variant(module: str, kernel: str, tile: Any, absent: tuple[str, ...] = (), **options: Any) -> Variant:
    options = {"ANY_FIT": False, "BY_TYPE": False, **options, "BN": tile.BN, "BB": tile.BB}
    return Variant(module, kernel, options, absent, tile.num_warps)


def _signature(variant: Variant) -> dict[str, Any]:
    """The arguments of ASTSource for a launch with aligned tensors, and with sizes that Triton does not specialise."""
    import importlib

    import triton.language as tl

    kernel = getattr(importlib.import_module(f"tritoncaps.kernels.{variant.module}"), variant.kernel)
    constants = {**variant.options, **dict.fromkeys(variant.absent)}
    if "DTYPE" in constants:
        constants["DTYPE"] = tl.float64 if variant.dtype == "fp64" else tl.float32
    types, attributes = {}, {}
    for parameter in kernel.params:
        name = parameter.name
        if name in constants:
            types[name] = "constexpr"
        elif name.startswith("p_"):
            stored = name in INPUTS or (name == "p_out" and variant.module.endswith("edge_view"))
            number = variant.storage if stored else variant.dtype
            types[name] = "*i32" if name.removeprefix("p_") in INDICES else f"*{number}"
            if not parameter.do_not_specialize_on_alignment:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        else:
            types[name] = parameter.annotation_type or "i32"
    constants = {name: value for name, value in constants.items() if name in types}
    return {"fn": kernel, "signature": types, "constexprs": constants, "attrs": attributes}


def _habits(asm: dict[str, str], contiguous: int) -> dict[str, int]:
    """Number of divisions in loops by a value that is not constant, and number of strided loads: loads whose
    neighbouring threads do not follow the contiguous axis of the tile."""
    divisors = re.findall(r"^ {6,}.* arith\.(?:div|rem)[su]i %\S+, (%\S+)", asm["ttir"], re.MULTILINE)
    orders = dict(re.findall(r"^(#\w+) = #ttg\.blocked<.*order = \[([\d, ]+)", asm["ttgir"], re.MULTILINE))
    loads = re.findall(r"tt\.load .*: tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+)>", asm["ttgir"])
    strided = 0
    for sizes, layout in loads:
        shape = [int(size) for size in sizes.split("x")]
        fastest = next((axis for axis in map(int, orders[layout].split(",")) if shape[axis] > 1), contiguous)
        strided += shape[contiguous] > 1 and fastest != contiguous % len(shape)
    return {"divisions": sum(not divisor.startswith("%c") for divisor in divisors), "strided": strided}


def _nvidia_usage(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = _run("cuobjdump", "-res-usage", file.name)
        loops = nest(_run("nvdisasm", "-c", file.name))
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", resources)}
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "spills": found["LOCAL"],  # bytes of local memory; spilled registers are here or on the stack
        "instructions": _code_size(cubin) // 16,  # an instruction has 16 bytes
        "loops": loops,  # instructions of the loops around a vote, the outermost first
    }


def _code_size(elf: bytes) -> int:
    """The number of bytes in the sections of an ELF file that contain code."""
    (table,), (entry, count) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 58)
    sections = (struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count))
    return sum(size for _, _, flags, _, _, size in sections if flags & 4)


def _amd_usage(assembly: str) -> dict[str, int]:
    def number(key: str) -> int:
        match = re.search(rf"\.{key}:\s+(\d+)", assembly)
        return int(match.group(1)) if match else 0

    instructions = re.findall(
        r"^\t([vs]_\w+|ds_\w+|global_\w+|buffer_\w+|flat_\w+|scratch_\w+)", assembly, re.MULTILINE
    )
    return {
        "registers": number("vgpr_count"),
        "stack": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),  # not scalar registers: they spill to vector registers, not to memory
        "instructions": len(instructions),
    }


def _run(tool: str, *arguments: str) -> str:
    """Run one of the binaries that Triton's package contains, and return its output."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the budget instead of comparing with it")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--any-compiler", action="store_true", help="compile only, by a Triton without a budget")
    arguments = parser.parse_args()
    if arguments.any_compiler:
        compile_only(arguments.targets)
        return 0
    if arguments.write:
        write(arguments.targets)
    results = [compare(target) for target in arguments.targets]
    found = [complaint for complaints, _ in results for complaint in complaints]
    print("\n".join(found) or f"all kernels are within the budget; {sum(n for _, n in results)} were compiled")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
