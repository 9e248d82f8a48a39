"""The machine where warps of a block meet in parts: by barriers of some of them and by mbarriers."""

from contextlib import nullcontext

import pytest
import torch

from tests.ptx.driver import Fault
from tests.ptx.test_machine import RACE, integers, run

# Warp 0 copies, warp 1 stores what it reads to y: five times 128 bytes, by a ring of two in shared memory. Of both
# mbarriers of a slot the first says that it is full, the second, 16 bytes on, that it is empty.
NEXT = """xor.b32 %r10, %r10, 1;
	setp.eq.u32 %p4, %r10, 0;
	selp.b32 %r17, 1, 0, %p4;
	xor.b32 %r11, %r11, %r17;
	add.s32 %r12, %r12, 1;
	setp.lt.u32 %p5, %r12, 5;"""
PLACES = """shl.b32 %r14, %r10, 3;
	add.s32 %r14, %r14, 512;
	shl.b32 %r16, %r10, 7;
	add.s32 %r16, %r16, %r13;"""


def waiting(barrier, parity):
    """As Triton has it: the label is the same in each of them."""
    return f"""{{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared.b64 complete, [{barrier}], {parity};
	@!complete bra.uni waitLoop;
}}"""


READ = """ld.shared.b32 %r4, [%r16];
	st.global.b32 [%rd5], %r4;
	add.s64 %rd5, %rd5, 128;"""
EMPTY = "@%p3 mbarrier.arrive.shared::cta.b64 _, [%r14+16];"
RING = f"""setp.eq.u32 %p1, %r1, 0;
	@%p1 mbarrier.init.shared::cta.b64 [512], 32;
	@%p1 mbarrier.init.shared::cta.b64 [520], 32;
	@%p1 mbarrier.init.shared::cta.b64 [528], 1;
	@%p1 mbarrier.init.shared::cta.b64 [536], 1;
	barrier.sync 0;
	mov.b32 %r10, 0;
	mov.b32 %r11, 0;
	mov.b32 %r12, 0;
	and.b32 %r13, %r2, 127;
	setp.ge.u32 %p2, %r1, 32;
	setp.eq.u32 %p3, %r13, 0;
	@%p2 bra $CONSUME;
	setmaxnreg.dec.sync.aligned.u32 40;
$PRODUCE:
	{PLACES}
	xor.b32 %r15, %r11, 1;
	{waiting("%r14+16", "%r15")}
	cp.async.ca.shared.global [%r16], [%rd4], 4;
	cp.async.mbarrier.arrive.noinc.shared.b64 [%r14];
	cp.async.commit_group;
	add.s64 %rd4, %rd4, 128;
	{NEXT}
	@%p5 bra $PRODUCE;
	cp.async.wait_group 0;
	bra.uni $END;
$CONSUME:
	{PLACES}
	{waiting("%r14", "%r11")}
	{READ}
	bar.warp.sync -1;
	{EMPTY}
	{NEXT}
	@%p5 bra $CONSUME;
$END:"""
STANDSTILL = "no warp can go on"
RING_FAULTS = {  # -> what stands there, what is to, words of the Fault
    "a consumer that does not wait": (waiting("%r14", "%r11"), "", f"{RACE}|a copy under way|{STANDSTILL}"),
    "a producer that does not wait": (waiting("%r14+16", "%r15"), "", f"{RACE}|a copy under way"),
    "a producer that waits for the phase before": (waiting("%r14+16", "%r15"), waiting("%r14+16", "%r11"), STANDSTILL),
    "nobody says that a slot is empty": (EMPTY, "", STANDSTILL),
    "nobody says that a slot is full": ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r14];", "", STANDSTILL),
    "a slot is said to be empty before it is read": (
        f"{READ}\n\tbar.warp.sync -1;\n\t{EMPTY}", f"{EMPTY}\n{READ}", f"{RACE}|a copy under way",
    ),
    "a slot is said to be full when its copies begin": (
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r14];", "mbarrier.arrive.shared::cta.b64 _, [%r14];",
        f"{RACE}|a copy under way",
    ),
    "one lane says that all have read": ("bar.warp.sync -1;", "", f"{RACE}|a copy under way"),
    "a count that is too large": ("[520], 32;", "[520], 33;", f"{STANDSTILL}.* lacks 1 of 33 arrivals"),
    "a count that is too small": ("[520], 32;", "[520], 16;", f"{STANDSTILL}|{RACE}|a copy under way"),
    "too many arrivals": ("_, [%r14+16];", "_, [%r14+16], 2;", "2 arrivals at an mbarrier that waits for 1"),
    "no mbarrier": ("@%p1 mbarrier.init.shared::cta.b64 [536], 1;", "", "no mbarrier is initialised at 0x218"),
    "no mbarrier any more": (
        "bra.uni $END;", "mbarrier.inval.shared::cta.b64 [512];\n bra.uni $END;",
        "no mbarrier is initialised at 0x200|may still read",
    ),
    "no barrier after mbarriers are initialised": ("barrier.sync 0;", "", f"no mbarrier is initialised|{RACE}"),
    "a store over an mbarrier": (
        "mov.b32 %r10, 0;", "mov.b32 %r10, 0;\n st.shared.b32 [516], %r10;", "as if it were memory",
    ),
    "a barrier that lacks a warp": ("barrier.sync 0;", "bar.sync 0, 96;", f"{STANDSTILL}.* barrier 0 for 3 warps"),
    "lanes that do not wait": ("mbarrier.try_wait", "@%p3 mbarrier.try_wait", "a part of the warp's lanes"),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_ring(seed, machine):
    machine.begin(seed)
    x, y = integers(192), torch.zeros(192, dtype=torch.int32)
    run(machine, RING, x, y)
    assert torch.equal(y[32:], x[:160])


@pytest.mark.parametrize("name", RING_FAULTS)
def test_faults_of_a_ring(name, machine):
    """They show whatever the order of warps is."""
    old, new, words = RING_FAULTS[name]
    assert old in RING
    for seed in range(6):
        machine.begin(seed)
        with pytest.raises(Fault, match=words):
            run(machine, RING.replace(old, new), integers(192), torch.zeros(192, dtype=torch.int32))


PARTS = """setp.ge.u32 %p1, %r1, 64;
	st.shared.b32 [%r2], %r3;
	@%p1 bra $SECOND;
	bar.sync 1, 64;
	bra.uni $BOTH;
$SECOND:
	bar.sync 2, 64;
	bar.sync 2, 64;
$BOTH:
	xor.b32 %r5, %r2, 128;
	ld.shared.b32 %r4, [%r5];
	st.global.b32 [%rd5], %r4;"""
PARTS_FAULTS = {
    "a place of the other part": ("%r2, 128;", "%r2, 256;", RACE),
    "a barrier that lacks a warp": ("@%p1 bra", "setp.ge.u32 %p2, %r1, 96;\n @%p2 ret;\n @%p1 bra", STANDSTILL),
    "a barrier of two counts": ("bar.sync 2, 64;\n$", "bar.sync 1, 128;\n$", "barrier 1 is for|no warp can go on"),
    "no barrier for some": ("bar.sync 1, 64;", "", RACE),
    "a barrier of half a warp": ("bar.sync 1, 64;", "bar.sync 1, 48;", "a barrier of 48 threads"),
    "a barrier that is not there": ("bar.sync 1, 64;", "bar.sync 16, 64;", "no barrier: 16"),
}


@pytest.mark.parametrize("seed", range(3))
def test_barriers_of_parts(seed, machine):
    machine.begin(seed)
    x, y = integers(128), torch.zeros(128, dtype=torch.int32)
    run(machine, PARTS, x, y, threads=128)
    assert torch.equal(y, x[torch.arange(128) ^ 32])


@pytest.mark.parametrize("name", PARTS_FAULTS)
def test_faults_of_parts(name, machine):
    old, new, words = PARTS_FAULTS[name]
    assert old in PARTS
    for seed in range(6):
        machine.begin(seed)
        with pytest.raises(Fault, match=words):
            run(machine, PARTS.replace(old, new), integers(128), torch.zeros(128, dtype=torch.int32), threads=128)


SUMS, ROWS = "{%r20, %r21, %r22, %r23}", "{%r24, %r25, %r26, %r27}"
MULTIPLY = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {SUMS}, {ROWS}, %rd9, 0, 1, 1, 0;"
FENCE = "fence.proxy.async.shared::cta;"
# Warp 0 stores 256 bytes, warp 1 multiplies by them and says when it has; then warp 0 stores there again.
PRODUCT = f"""setp.eq.u32 %p1, %r1, 0;
	@%p1 mbarrier.init.shared::cta.b64 [512], 32;
	@%p1 mbarrier.init.shared::cta.b64 [520], 32;
	bar.sync 0;
	shl.b32 %r6, %r1, 3;
	setp.ge.u32 %p2, %r1, 32;
	@%p2 bra $MULTIPLY;
	// FIRST
	st.shared.v2.b32 [%r6], {{%r3, %r3}};
	// STORED
	mbarrier.arrive.shared::cta.b64 _, [512];
	{waiting("520", "0")}
	st.shared.v2.b32 [%r6], {{%r1, %r1}};
	bra.uni $END;
$MULTIPLY:
	// BEFORE
	{waiting("512", "0")}
	// WAITED
	mov.b64 %rd9, 68720001024;
	{MULTIPLY}
	wgmma.commit_group.sync.aligned;
	// MULTIPLIED
	wgmma.wait_group.sync.aligned 0;
	// READ
$END:"""
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [520];"


@pytest.mark.parametrize(
    "fence, arrive, words",
    [
        ("STORED", "READ", None),
        ("WAITED", "READ", None),
        ("FIRST", "READ", "no fence has made visible"),
        ("BEFORE", "READ", "no fence has made visible"),
        ("NOWHERE", "READ", "no fence has made visible"),
        ("STORED", "MULTIPLIED", "may still read|written while a product"),
    ],
)
def test_products_of_what_another_warp_stored(fence, arrive, words, machine):
    body = PRODUCT.replace(f"// {fence}", FENCE).replace(f"// {arrive}", ARRIVE)
    for seed in range(6):
        machine.begin(seed)
        with pytest.raises(Fault, match=words) if words else nullcontext():
            run(machine, body, integers(), torch.zeros(64, dtype=torch.int32))
