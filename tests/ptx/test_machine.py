"""The machine itself: what its instructions compute, and that it notices what goes wrong."""

import math
import struct

import pytest
import torch
import triton
import triton.language as tl

import tfm_kernels as tfk
from tests.ptx.driver import Fault, Launch, storages

MODULE = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {threads}
{{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<29>;
	ld.param.b64 %rd1, [kernel_param_0];
	ld.param.b64 %rd2, [kernel_param_1];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd1, %rd3;
	add.s64 %rd5, %rd2, %rd3;
	shl.b32 %r2, %r1, 2;
	ld.global.b32 %r3, [%rd4];
{body}
	ret;
}}
"""


def run(machine, body, x, y, threads=64, shared=1024, grid=(1, 1, 1)):
    """Runs a kernel: %rd1, %rd2 point to x and y, %rd4, %rd5 to their elements of 4 bytes of this thread, whose number
    %r1 is and 4 times it %r2; %r3 is x there."""
    program = machine.read(MODULE.format(threads=threads, body=body))
    parameters = [struct.pack("<Q", t.data_ptr()) for t in (x, y)]
    machine.launch(Launch("kernel", program, grid, threads, shared, parameters, storages([x, y])))
    return y


def floats(count=64):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3
    x[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40])
    return x


def integers(count=64):
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)


def unsigned(x):
    return x.to(torch.int64) & 0xFFFFFFFF


INTEGERS = {
    "add.s32 %r4, %r3, 7": lambda x: x + 7,
    "mul.lo.s32 %r4, %r3, 77": lambda x: x * 77,
    "mul.hi.u32 %r4, %r3, 0x80000001": lambda x: (unsigned(x) * 0x80000001).div(2**32, rounding_mode="floor"),
    "div.s32 %r4, %r3, -7": lambda x: torch.div(x, -7, rounding_mode="trunc"),
    "shr.s32 %r4, %r3, 3": lambda x: x >> 3,
    "shr.u32 %r4, %r3, 3": lambda x: unsigned(x) >> 3,
    "shl.b32 %r4, %r3, 40": lambda x: x * 0,
    "bfe.s32 %r4, %r3, 4, 6": lambda x: ((x >> 4 & 63) ^ 32) - 32,
    "bfe.u32 %r4, %r3, 28, 9": lambda x: unsigned(x) >> 28,
    "bfi.b32 %r4, %r3, 0x407, 4, 6": lambda x: (x & 63) << 4 | 0x407,
    "{.reg .b16 low, high;\n mov.b32 {low, high}, %r3;\n mov.b32 %r4, {high, low}; }\n mov.b32 %r4, %r4": lambda x: (
        (x & 0xFFFF) << 16 | (x >> 16 & 0xFFFF)
    ),
    "setp.lt.s32 %p1, %r3, 0;\n{ \n.reg .pred %p1; \n setp.ge.s32 %p1, %r3, 0; \n}\n selp.b32 %r4, 1, 2, %p1": (
        lambda x: torch.where(x < 0, 1, 2)
    ),
    "setp.eq.s32 %p1, %r1, 40;\n bar.red.or.pred %p2, 0, %p1;\n selp.b32 %r4, 1, 2, %p2": lambda x: 0 * x + 1,
    "{ .reg .b64 product; mul.wide.u32 product, %r3, -3; mov.b64 {_, %r4}, product; }\n mov.b32 %r4, %r4": (
        lambda x: unsigned(x) + (-3 * unsigned(x) >> 32)
    ),
    "prmt.b32 %r4, %r3, 0, 0x3214U": lambda x: x & -256,
    "lop3.b32 %r4, %r3, 0xff, 0xf, 0x96": lambda x: x ^ 0xFF ^ 0xF,
    "mov.b32 %r5, 0x00017fff;\n add.s16x2 %r4, %r3, %r5": lambda x: (x >> 16) + 1 << 16 | (x + 0x7FFF & 0xFFFF),
    "mov.b32 %r5, 0x00017fff;\n min.u16x2 %r4, %r3, %r5": lambda x: (
        (x >> 16 & 0xFFFF).clamp(max=1) << 16 | (x & 0xFFFF).clamp(max=0x7FFF)
    ),
    "shf.l.wrap.b32 %r4, %r3, %r3, 4": lambda x: unsigned(x) << 4 & 0xFFFFFFFF | unsigned(x) >> 28,
    "min.s32 %r4, %r3, 5": lambda x: x.clamp(max=5),
    "min.u32 %r4, %r3, 5": lambda x: unsigned(x).clamp(max=5),
    "min.relu.s32 %r4, %r3, 5": lambda x: x.clamp(0, 5),
    "cvt.s16.s32 %rs1, %r3;\n cvt.s32.s16 %r4, %rs1": lambda x: x.to(torch.int16),
    "cvt.u16.u32 %rs1, %r3;\n cvt.s32.s8 %r4, %rs1": lambda x: x.to(torch.int8),
    "mov.b32 {_, %rs1}, %r3;\n mov.b32 %r4, {%rs1, %rs1}": lambda x: (x >> 16 & 0xFFFF) * 65537,
    "setp.lt.s32 %p1, %r3, 0;\n selp.b32 %r4, 1, 2, %p1": lambda x: torch.where(x < 0, 1, 2),
    "setp.lt.u32 %p1, %r3, 9;\n selp.b32 %r4, 1, 2, %p1": lambda x: torch.where(unsigned(x) < 9, 1, 2),
    "shfl.sync.bfly.b32 %r4, %r3, 5, 31, -1": lambda x: x[torch.arange(64) ^ 5],
    "shfl.sync.idx.b32 %r4, %r3, 9, 31, -1": lambda x: x[torch.arange(64) // 32 * 32 + 9],
    "shfl.sync.up.b32 %r4, %r3, 2, 0, -1": lambda x: x[torch.arange(64) - 2 * (torch.arange(64) % 32 > 1)],
    "redux.sync.max.s32 %r4, %r3, -1": lambda x: x.view(2, 32).amax(1, keepdim=True).expand(2, 32).flatten(),
    "setp.lt.s32 %p1, %r3, 0;\n @%p1 bra $A;\n mov.b32 %r4, 1;\n bra.uni $B;\n$A:\n mov.b32 %r4, 2;\n$B:\n"
    " shfl.sync.bfly.b32 %r4, %r4, 1, 31, -1": lambda x: torch.where(x < 0, 2, 1)[torch.arange(64) ^ 1],
}


@pytest.mark.parametrize("code", INTEGERS)
def test_integers(code, machine):
    x = integers()
    y = run(machine, f"{code};\n st.global.b32 [%rd5], %r4;", x, torch.zeros(64, dtype=torch.int32))
    assert torch.equal(y, INTEGERS[code](x.to(torch.int64)).to(torch.int32))


def rounded_down(x):
    near = x.float()
    return torch.where(near > x, torch.nextafter(near, torch.tensor(-math.inf)), near)


FLOATS = {  # -> function, the largest error, of itself
    "add.rn.f32 %r4, %r3, 0f3FC00000": (lambda x: x + 1.5, 0),
    "fma.rn.f32 %r4, %r3, %r3, %r3": (lambda x: (x.double() * x.double() + x.double()).float(), 0),
    "fma.rn.ftz.f32 %r4, %r3, 0f3F800000, 0f00000000": (lambda x: torch.where(x.abs() < 1e-38, 0 * x, x), 0),
    "fma.rm.f32 %r4, %r3, 0f3F800000, 0fAB800000": (lambda x: rounded_down(x.double() - 2.0**-40), 0),
    "cvt.sat.f32.f32 %r4, %r3": (lambda x: x.nan_to_num(0).clamp(0, 1), 0),
    "div.rn.f32 %r4, %r3, 0f40400000": (lambda x: x / 3, 0),
    "div.full.f32 %r4, %r3, 0f40400000": (lambda x: x / 3, 2**-22),
    "max.f32 %r4, %r3, 0f3F800000": (lambda x: torch.fmax(x, torch.ones(()))  , 0),
    "max.NaN.f32 %r4, %r3, 0f3F800000": (lambda x: torch.maximum(x, torch.ones(())), 0),
    "mov.b64 %rd9, {%r3, %r3};\n fma.rn.f32x2 %rd9, %rd9, %rd9, %rd9;\n mov.b64 {_, %r4}, %rd9": (
        lambda x: (x.double() * x.double() + x.double()).float(), 0,
    ),
    "abs.ftz.f32 %r4, %r3": (lambda x: torch.where(x.abs() < 1e-38, 0 * x, x).abs(), 0),
    "ex2.approx.f32 %r4, %r3": (torch.exp2, 2**-21),
    "sqrt.rn.f32 %r4, %r3": (lambda x: x.double().sqrt().float(), 0),
    "cvt.rn.bf16.f32 %rs1, %r3;\n cvt.f32.bf16 %r4, %rs1": (lambda x: x.bfloat16().float(), 0),
    "cvt.rn.f16x2.f32 %r5, %r3, %r3;\n mov.b32 {_, %rs1}, %r5;\n cvt.f32.f16 %r4, %rs1": (
        lambda x: x.half().float(), 0,
    ),
    "setp.neu.f32 %p1, %r3, %r3;\n selp.f32 %r4, 0f3F800000, 0f00000000, %p1": (lambda x: x.isnan().float(), 0),
    "setp.lt.f32 %p1, %r3, 0f00000000;\n selp.f32 %r4, 0f3F800000, 0f00000000, %p1": (lambda x: (x < 0).float(), 0),
    "cvt.rzi.s32.f32 %r5, %r3;\n cvt.rn.f32.s32 %r4, %r5": (lambda x: x.nan_to_num(0, 2.0**31, -(2.0**31)).trunc(), 0),
    "cvt.rn.bf16x2.f32 %r5, %r3, 0f00000000;\n add.rn.bf16x2 %r5, %r5, %r5;\n mov.b32 {_, %rs1}, %r5;\n"
    " cvt.f32.bf16 %r4, %rs1": (lambda x: (x.bfloat16() + x.bfloat16()).float(), 0),
    "cvt.rn.bf16.f32 %rs1, %r3;\n fma.rn.bf16 %rs1, %rs1, %rs1, %rs1;\n cvt.f32.bf16 %r4, %rs1": (
        lambda x: (x.bfloat16().double() ** 2 + x.bfloat16().double()).bfloat16().float(), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", FLOATS)
def test_floats(code, machine):
    x, (function, error) = floats(), FLOATS[code]
    y = run(machine, f"{code};\n st.global.b32 [%rd5], %r4;", x, torch.full((64,), -1.0))
    expected = function(x)
    assert torch.equal(y.isnan(), expected.isnan())
    same = expected.isnan() | (y == expected) | ((y - expected).abs() <= error * expected.abs())
    assert same.all(), (x[~same], y[~same], expected[~same])
    if error:
        assert not torch.equal(y[6:], expected[6:]), "as exact as a GPU need not be"


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr):
    """(64, 16) = (64, 16) (16, 16)."""
    m, n, k = tl.arange(0, 64)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 16)
    product = tl.dot(tl.load(a_ptr + 16 * m + k[None, :]), tl.load(b_ptr + 16 * k[:, None] + n))
    tl.store(c_ptr + 16 * m + n, product)


@pytest.mark.parametrize("arch", [80, 90])
def test_sums_of_matrix_units_are_cut_off(arch, gpu):
    """Of 1 and 15 times a small product a unit keeps one bit under float32's last, or two since sm_90."""
    ulp = 2.0**-23
    for exponent, ulps in ((-26, 0), (-25, 3 if arch == 90 else 0), (-24, 7)):
        a, b = torch.full((64, 16), 2.0**-12), torch.full((16, 16), 2.0 ** (exponent + 12))
        a[:, 0], b[0] = 1, 1
        found = torch.zeros(64, 16)
        product_kernel[(1,)](a.bfloat16(), b.bfloat16(), found)
        assert found.unique().tolist() == [1 + ulps * ulp]


RACE = "races with a write|may still read"  # by which of two warps comes first
FAULTS = {
    "one element too far": ("st.global.b32 [%rd5 + 4], %r3;", "lies outside of a tensor"),
    "a place that is not aligned": ("st.global.b32 [%rd2 + 2], %r3;", "not aligned to 4"),
    "shared memory that is not there": ("st.shared.b32 [%r2 + 1000], %r3;", "no place for 4 bytes of shared"),
    "no barrier before a read": (
        "st.shared.b32 [%r2], %r3;\n xor.b32 %r5, %r2, 128;\n ld.shared.b32 %r4, [%r5];", RACE,
    ),
    "no barrier before the next write": (
        "xor.b32 %r5, %r2, 128;\n st.shared.b32 [%r2], %r3;\n bar.sync 0;\n ld.shared.b32 %r4, [%r5];\n"
        " add.s32 %r3, %r3, 1;\n st.shared.b32 [%r2], %r3;", RACE,
    ),
    "another lane's write, no wait": (
        "xor.b32 %r5, %r2, 4;\n st.shared.b32 [%r2], %r3;\n ld.shared.b32 %r4, [%r5];", "a write of another lane",
    ),
    "another warp's copy, waited for after the barrier": (
        "cp.async.ca.shared.global [%r2], [%rd4], 4;\n cp.async.commit_group;\n bar.sync 0;\n"
        " cp.async.wait_group 0;\n xor.b32 %r5, %r2, 128;\n ld.shared.b32 %r4, [%r5];", f"{RACE}|a copy under way",
    ),
    "another lane's copy, no wait": (
        "cp.async.ca.shared.global [%r2], [%rd4], 4;\n cp.async.commit_group;\n cp.async.wait_group 0;\n"
        " xor.b32 %r5, %r2, 4;\n ld.shared.b32 %r4, [%r5];", "a write of another lane",
    ),
    "a write over what another lane reads": (
        "xor.b32 %r5, %r2, 4;\n st.shared.b32 [%r2], %r3;\n bar.warp.sync -1;\n ld.shared.b32 %r4, [%r5];\n"
        " add.s32 %r4, %r4, 1;\n st.shared.b32 [%r2], %r4;", "another lane may still read",
    ),
    "two warps, one place": ("and.b32 %r5, %r2, 127;\n st.shared.b32 [%r5], %r1;", "races with a write"),
    "two warps, one place of a tensor": ("st.global.b32 [%rd2], %r1;", "races with a write"),
    "a read while a copy is under way": (
        "cp.async.ca.shared.global [%r2], [%rd4], 4;\n cp.async.commit_group;\n ld.shared.b32 %r4, [%r2];\n"
        " cp.async.wait_group 0;", "a copy under way",
    ),
    "a copy that is not waited for": ("cp.async.ca.shared.global [%r2], [%rd4], 4;", "has not waited for"),
    "another warp's copy, no barrier": (
        "cp.async.ca.shared.global [%r2], [%rd4], 4;\n cp.async.commit_group;\n cp.async.wait_group 0;\n"
        " xor.b32 %r5, %r2, 128;\n ld.shared.b32 %r4, [%r5];", f"{RACE}|a copy under way",
    ),
    "a barrier for some": ("setp.lt.s32 %p1, %r1, 5;\n @%p1 bra $A;\n bar.sync 0;\n$A:", "a part of a warp's lanes"),
    "a barrier where some vote": (
        "setp.lt.s32 %p1, %r1, 32;\n @%p1 bra $A;\n bar.sync 0;\n bra.uni $B;\n$A:\n bar.red.or.pred %p2, 0, %p1;\n$B:",
        "some warps vote",
    ),
    "a parameter that is not there": ("ld.param.b64 %rd9, [kernel_param_1 + 8];", "reads past the parameters"),
    "a barrier for one warp": ("setp.lt.s32 %p1, %r1, 32;\n @%p1 bra $A;\n bar.sync 0;\n$A:", "the others ended"),
    "a lane that is elsewhere": (
        "setp.lt.s32 %p1, %r1, 5;\n @%p1 bra $A;\n shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;\n$A:", "are elsewhere",
    ),
    "what it does not know": ("tex.1d.v4.f32.s32 %r4, %r3;", "does not know: tex.1d"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name, machine):
    body, words = FAULTS[name]
    with pytest.raises(Fault, match=words):
        run(machine, body, integers(), torch.zeros(64, dtype=torch.int32))


def test_two_blocks_that_write_one_place(machine):
    with pytest.raises(Fault, match="races with a write"):
        run(machine, "st.global.b32 [%rd5], %r1;", integers(), torch.zeros(64, dtype=torch.int32), grid=(2, 1, 1))


@pytest.mark.parametrize("missing", ["nothing", "RELEASE", "ACQUIRE"])
def test_blocks_that_come_after_one_another(missing, machine):
    """The block that takes a ticket second reads what the first wrote before it came by: with a fence each."""
    body = """mov.b32 %r6, 0;
	setp.eq.s32 %p1, %r1, 0;
	@%p1 atom.global.add.u32 %r6, [%rd2 + 256], 1;
	shfl.sync.idx.b32 %r6, %r6, 0, 31, -1;
	setp.eq.s32 %p2, %r6, 0;
	@%p2 st.global.b32 [%rd5], %r3;
	membar.gl; // RELEASE
	@%p1 atom.global.add.u32 %r7, [%rd2 + 260], 1;
	membar.gl; // ACQUIRE
	@!%p2 ld.global.b32 %r4, [%rd5];
	@!%p2 st.global.b32 [%rd5 + 128], %r4;"""
    body = "\n".join(line for line in body.splitlines() if missing not in line)
    x, y = integers(32), torch.zeros(66, dtype=torch.int32)
    if missing != "nothing":
        with pytest.raises(Fault, match="races with a write"):
            run(machine, body, x, y, threads=32, grid=(2, 1, 1))
        return
    run(machine, body, x, y, threads=32, grid=(2, 1, 1))
    assert torch.equal(y[:32], x) and torch.equal(y[32:64], x) and y[64:].tolist() == [2, 2]


def test_right_programs_pass(machine):
    """What the faults above come from, with what was missing."""
    body = """xor.b32 %r5, %r2, 128;
	cp.async.ca.shared.global [%r2], [%rd4], 4;
	cp.async.commit_group;
	cp.async.wait_group 0;
	bar.sync 0;
	ld.shared.b32 %r4, [%r5];
	bar.sync 0;
	st.shared.b32 [%r2], %r4;
	bar.sync 0;
	ld.shared.b32 %r4, [%r5];
	st.global.b32 [%rd5], %r4;"""
    x = integers()
    assert torch.equal(run(machine, body, x, torch.zeros_like(x)), x)


def removed(text, word):
    """The module without one line that begins with ``word``, for each of these."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.strip().startswith(word):
            yield "".join(lines[:number] + lines[number + 1 :])


def bytes_of(t):
    return t.detach().contiguous().flatten().view(torch.uint8)


def seen(machine, launch, text, kept):
    """Whether a Fault or another result shows that a launch ran another text; ``kept``: its tensors as they were."""
    after = [t.detach().clone() for t in launch.tensors]
    for t, before in zip(launch.tensors, kept, strict=True):
        t.detach().copy_(before)
    try:
        machine.launch(Launch(**{**vars(launch), "program": machine.read(text)}))
    except Fault:
        return True
    same = [torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(after, launch.tensors, strict=True)]
    return not all(same)


def attention_step(backend):
    """Output and gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 200, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    options = {"dropout_p": 0.1, "seed": torch.tensor(3), "backend": backend}
    out = tfk.ops.attention(q, k, v, tfk.Mask.causal(), **options)
    return [out, *torch.autograd.grad(out.float().square().sum(), [q, k, v])]


@pytest.mark.parametrize("arch", [80, 90])
def test_what_is_left_out_of_a_kernel_shows(arch, gpu):
    """Of attention's kernels one wait for copies or barrier each: every wait is missed, and most barriers.

    Other barriers stand where this call does not come by, or twice one after the other.
    """
    gpu.begin(keep=True)
    attention_step("triton")
    waits, barriers = [], []
    launches = gpu.launches
    gpu.begin()
    for launch in launches:
        kept = [t.detach().clone() for t in launch.tensors]
        gpu.launch(launch)
        waits += [seen(gpu, launch, text, kept) for text in removed(launch.program.text, "cp.async.wait_group")]
        barriers += [seen(gpu, launch, text, kept) for text in removed(launch.program.text, "bar.sync")]
    assert len(waits) >= 8 and all(waits)
    assert len(barriers) >= 70 and sum(barriers) >= len(barriers) / 2
