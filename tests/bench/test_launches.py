"""Launches are counted in the text of a compiled program."""

from k26jax.bench.launches import by_stage, launched, per_layer

TEXT = """HloModule jit_alone, is_scheduled=true

%fused_add (param_0: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%param_0, %param_0)
}

%sampled (arg.1: f32[8]) -> f32[8] {
  %arg.1 = f32[8]{0} parameter(0)
  %s.1 = f32[8]{0} fusion(%arg.1), kind=kLoop, calls=%fused_add, metadata={op_name="a/accept/s"}
  ROOT %s.2 = f32[8]{0} fusion(%s.1), kind=kLoop, calls=%fused_add
}

%greedy (arg.2: f32[8]) -> f32[8] {
  %arg.2 = f32[8]{0} parameter(0)
  ROOT %g.1 = f32[8]{0} custom-call(%arg.2), metadata={op_name="jit(a)/while/body/accept/best"}
}

%body (arg.3: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg.3 = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%arg.3), index=1
  %k.1 = (f32[8]{0}, s32[]) custom-call(%x), metadata={op_name="a/body/verify/layer_1/dense"}
  %k.2 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_add, metadata={op_name="verify/layer_10/n"}
  %k.3 = f32[8]{0:T(8)} copy(%k.2)
  %c.1 = f32[8]{0} conditional(%p, %x, %x), true_computation=%sampled, false_computation=%greedy
  %c.2 = f32[8]{0} conditional(%i, %x, %x), branch_computations={%greedy, %sampled}
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %c.1)
}

ENTRY %main.1 (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %k.9 = f32[8]{0} fusion(%p.1), kind=kLoop, calls=%fused_add
  %while.1 = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body
  ROOT %r = f32[8]{0} get-tuple-element(%while.1), index=1
}
"""


def test_one_turn_of_the_loop_with_the_greedy_branches():
    paths = launched(TEXT)
    assert len(paths) == 5
    assert by_stage(paths) == {"verify": 2, "accept": 2, "": 1}
    assert per_layer(paths, (1, 2)) == 0.5
    assert per_layer(paths, (1, 10)) == 1
    assert per_layer(paths, ()) == 0


def test_a_program_without_a_loop():
    text = TEXT.replace("ENTRY %main.1", "%unused").replace("%body (arg.3", "ENTRY %body (arg.3")
    assert len(launched(text)) == 5
