"""Reading collectives from a compiled program's text, as XLA writes it for CPU and for TPU."""

from __future__ import annotations

from jaxagent.compiled import collectives, kernels, moved_bytes, summary, totals

TEXT = """HloModule jit_step

%add.1 (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  ROOT %s.1 = f32[] add(%x.1, %x.1)
}

%all-reduce-scatter.3 (input: bf16[512,4]) -> bf16[128,4] {
  %input = bf16[512,4]{1,0} parameter(0)
  %all-reduce.9 = bf16[512,4]{1,0:T(8,128)(2,1)} all-reduce(%input), to_apply=%add.1
  ROOT %slice = bf16[128,4]{1,0} dynamic-slice(%all-reduce.9)
}

%async_collective_fusion.1 (p: bf16[16,8]) -> bf16[64,8] {
  %p = bf16[16,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[64,8]{1,0} all-gather(%p), frontend_attributes={chain_id="7"}, metadata={op_name="step/w"}
}

%body.2 (carry: (s32[], bf16[16,8])) -> (s32[], bf16[16,8]) {
  %carry = (s32[], bf16[16,8]{1,0}) parameter(0)
  %w = bf16[16,8]{1,0} get-tuple-element(%carry), index=1
  %f.1 = bf16[64,8]{1,0} fusion(%w), kind=kCustom, calls=%async_collective_fusion.1
  %all-gather.2 = bf16[64,8]{1,0} all-gather(%w), frontend_attributes={chain_id="7"}, metadata={op_name="step/w"}
  %f.2 = bf16[128,4]{1,0} fusion(%w), kind=kCustom, calls=%all-reduce-scatter.3
  %step = (bf16[16,8]{1,0}, bf16[16,8]{1,0}, u32[], u32[]) collective-permute-start(%w), metadata={op_name="a/dot_general"}
  ROOT %t = (s32[], bf16[16,8]{1,0}) tuple(%w, %w)
}

%condition.2 (carry: (s32[], bf16[16,8])) -> pred[] {
  ROOT %less = pred[] constant(true)
}

%dead.1 (p: f32[8]) -> f32[64] {
  ROOT %all-gather.8 = f32[64]{0} all-gather(%p)
}

ENTRY %main.1 (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %loop = (s32[], bf16[16,8]{1,0}) while(%a), condition=%condition.2, body=%body.2, metadata={op_name="step/layers/while"}
  ROOT %sum = (f32[8]{0}, s32[2]{0}) all-reduce(%a, %a), to_apply=%add.1, metadata={op_name="step/psum"}
}
"""


def test_collectives_are_told_with_their_loop_and_what_they_act_on() -> None:
    found = {(one.kind, one.arrays, one.loop, one.overlapped) for one in collectives(TEXT)}
    layers = "step/layers/while"
    assert found == {
        ("all-reduce", ("f32[8]", "s32[2]"), "", False),
        ("all-gather", ("bf16[64,8]",), layers, True),
        ("reduce-scatter", ("bf16[512,4]",), layers, False),
        ("collective-permute", ("bf16[16,8]",), layers, True),
    }


def test_one_that_is_carried_out_in_steps_counts_once_and_dead_ones_never() -> None:
    assert sorted(one.kind for one in collectives(TEXT)) == [
        *("all-gather", "all-reduce", "collective-permute", "reduce-scatter"),
    ]


def test_sizes_are_those_of_all_arrays_together() -> None:
    sizes = {one.kind: one.size_bytes for one in collectives(TEXT)}
    assert sizes == {"all-reduce": 40, "all-gather": 1024, "reduce-scatter": 4096, "collective-permute": 256}


def test_the_summary_adds_up_each_kind_and_leaves_small_ones_out() -> None:
    found = collectives(TEXT)
    assert summary(found, smallest_bytes=1000) == "1 all-gather 0.0 MB (1 overlapped), 1 reduce-scatter 0.0 MB"
    assert "1 collective-permute of products" in summary(found)
    assert summary([]) == "none"


MOVING = """HloModule jit_decode

%scatter.1 (held: bf16[64,8], at: s32[2], new: bf16[2,8]) -> bf16[64,8] {
  %held = bf16[64,8]{1,0} parameter(0)
  %at = s32[2]{0} parameter(1)
  %new = bf16[2,8]{1,0} parameter(2)
  ROOT %put = bf16[64,8]{1,0} scatter(%held, %at, %new), to_apply=%keep
}

%part.1 (table: bf16[100,8], at: s32[2]) -> bf16[2,8] {
  %table.1 = bf16[100,8]{1,0} parameter(0)
  %at.1 = s32[2]{0} parameter(1)
  ROOT %rows = bf16[2,8]{1,0} gather(%table.1, %at.1)
}

%plain.1 (q: bf16[2,8]) -> bf16[2,8] {
  %q = bf16[2,8]{1,0} parameter(0)
  ROOT %copy.1 = bf16[2,8]{1,0} copy(%q)
}

%asked.1 (q: bf16[2,8]) -> bf16[2,8] {
  %q.1 = bf16[2,8]{1,0} parameter(0)
  %much = f32[2,1000]{1,0} broadcast(%q.1)
  ROOT %copy.2 = bf16[2,8]{1,0} copy(%q.1)
}

%body.1 (carry: (bf16[64,8], bf16[100,8])) -> (bf16[64,8], bf16[100,8]) {
  %carry = (bf16[64,8]{1,0}, bf16[100,8]{1,0}) parameter(0)
  %cache = bf16[64,8]{1,0} get-tuple-element(%carry), index=0
  %table = bf16[100,8]{1,0} get-tuple-element(%carry), index=1
  %i = s32[2]{0:S(1)} constant({1, 2})
  %looked = bf16[2,8]{1,0} fusion(%table, %i), kind=kLoop, calls=%part.1
  %grown = bf16[64,8]{1,0} fusion(%cache, %i, %looked), kind=kCustom, calls=%scatter.1, backend_config={IN_PLACE}
  %fast = (bf16[64,8]{1,0:S(1)}, bf16[64,8]{1,0}, u32[]) copy-start(%grown)
  %near = bf16[64,8]{1,0:S(1)} copy-done(%fast)
  %seen = bf16[2,8]{1,0} custom-call(%looked, %grown), custom_call_target="tpu_custom_call", backend_config={KERNEL}
  %said = bf16[2,8]{1,0} conditional(%i, %seen, %seen), true_computation=%asked.1, false_computation=%plain.1
  ROOT %t = (bf16[64,8]{1,0}, bf16[100,8]{1,0}) tuple(%grown, %table)
}

ENTRY %main.1 (a: bf16[64,8], b: bf16[100,8]) -> (bf16[64,8], bf16[100,8]) {
  %a = bf16[64,8]{1,0} parameter(0)
  %b = bf16[100,8]{1,0} parameter(1)
  %start = (bf16[64,8]{1,0}, bf16[100,8]{1,0}) tuple(%a, %b)
  ROOT %loop = (bf16[64,8]{1,0}, bf16[100,8]{1,0}) while(%start), condition=%c, body=%body.1TRIPS
}
"""


IN_PLACE = '"aliasing_operands":{"lists":[{"indices":["0","3"]}]}'
MOVING = MOVING.replace("KERNEL", '"cost_estimate":{"bytes_accessed":"640"}')


def test_bytes_are_of_slices_changes_and_the_cheapest_alternative_for_every_run_of_a_loop() -> None:
    row = 2 * 8 * 2
    step = 2 * row  # looked up: read and written
    step += 2 * row  # the change of the cache: read, and put into it; not its other rows
    step += 64 * 8 * 2  # all of it into fast memory, once
    step += 640  # as the kernel says
    step += 2 * row  # the alternative that copies only
    text = MOVING.replace("IN_PLACE", IN_PLACE)
    known = text.replace("TRIPS", ', backend_config={"known_trip_count":{"n":"5"}}')
    assert moved_bytes(known) == 5 * step
    assert moved_bytes(text.replace("TRIPS", ""), trips=3) == 3 * step


CASTING = """HloModule jit_layer

%fused.1 (stack: f32[28,64,8], at: s32[]) -> bf16[64,8] {
  %stack = f32[28,64,8]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %slice = bf16[1,64,8]{2,1,0} dynamic-slice(%stack, %at, %at, %at), dynamic_slice_sizes={1,64,8}
  ROOT %bitcast = bf16[64,8]{1,0} bitcast(%slice)
}

ENTRY %main (a: f32[28,64,8], i: s32[]) -> bf16[64,8] {
  %a = f32[28,64,8]{2,1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  ROOT %fusion = bf16[64,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused.1
}
"""


def test_a_slice_that_is_cast_as_it_is_read_counts_as_it_lies_in_memory() -> None:
    assert moved_bytes(CASTING) == 64 * 8 * (4 + 2)


def test_a_change_that_is_not_in_place_moves_everything() -> None:
    text = MOVING.replace("TRIPS", "")
    changed = moved_bytes(text.replace("IN_PLACE", IN_PLACE))
    assert moved_bytes(text.replace("IN_PLACE", "")) - changed == 2 * 64 * 8 * 2 - 2 * 8 * 2


def test_a_loops_kernels_count_as_often_as_it_runs_and_of_alternatives_the_fewest() -> None:
    text = MOVING.replace("IN_PLACE", IN_PLACE)
    assert (
        kernels(text.replace("TRIPS", ""), trips=3) == 3 * 5
    )  # two fusions, a copy, a kernel, and the alternative that copies only
    assert kernels(text.replace("TRIPS", ', backend_config={"known_trip_count":{"n":"5"}}')) == 5 * 5


def test_a_loop_whose_condition_counts_to_a_constant_runs_so_often() -> None:
    """As the text for TPUs has it, where no trip count is written beside the loop."""
    condition = """%condition.2 (carry: (s32[], bf16[16,8])) -> pred[] {
  %constant.7 = s32[]{:T(128)} constant(28)
  %carry = (s32[], bf16[16,8]{1,0}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%carry), index=0
  ROOT %less = pred[]{:T(512)} compare(%at, %constant.7), direction=LT, metadata={op_name="step/layers/while/cond/lt"}
}"""
    unknown = """%condition.2 (carry: (s32[], bf16[16,8])) -> pred[] {
  ROOT %less = pred[] constant(true)
}"""
    assert unknown in TEXT
    assert totals(collectives(TEXT))["all-gather"] == {"runs": 1, "bytes": 1024}
    counted = totals(collectives(TEXT.replace(unknown, condition)))
    assert counted["all-gather"] == {"runs": 28, "bytes": 28 * 1024}
    assert counted["all-reduce"] == {"runs": 1, "bytes": 40}  # outside of it
