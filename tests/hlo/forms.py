"""Modules as people write them, for the tests of the reader and for the fuzzer."""

FORMS = {
    "attributes on the next line": """HloModule m
body {
  a = f32[4] parameter(0)
  ROOT b = f32[4] negate(a)
}
ENTRY e {
  p = f32[4] parameter(0)
  f = f32[4] fusion(p), kind=kLoop,
      calls=body
  g = f32[4] fusion(f),
    kind=kLoop
    , calls=
      body, metadata={
      op_name="x"}
  ROOT r = pred[4] compare(g, p),
    direction=LT
}
""",
    "no HloModule": """add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY e {
  p = f32[4] parameter(0)
  ROOT r = f32[4] all-reduce(p), replica_groups={}, to_apply=add
}
""",
    "no ENTRY": """HloModule m
f {
  a = f32[4] parameter(0)
  ROOT b = f32[4] negate(a)
}
g {
  p = f32[4] parameter(0)
  ROOT r = f32[4] call(p), to_apply=f
}
""",
    "a header over several lines": """HloModule m,
  is_scheduled=true, num_partitions=2,
  entry_computation_layout={(f32[4]{0})->f32[4]{0}}
ENTRY e { ROOT p = f32[4]{0} parameter(0) }
""",
    "one line": "HloModule m ENTRY e { a = f32[4] parameter(0) b = f32[4] negate(a) "
    "c = pred[4] compare(a, b), direction=LT ROOT t = (f32[4], pred[4]) tuple(b, c) }",
    "operands of all kinds": """HloModule m
ENTRY e {
  %p = f32[4] parameter(0)
  q = f32[4] parameter(1)
  a = f32[4] add(%p, q)
  b = f32[4] add(q, %a)
  c = f32[4] multiply(f32[4] %p, f32[4]{0} q)
  %d = f32[4] add(b, /* not this one: %a */ c)
  ROOT %t = (f32[4], f32[4]) tuple(f32[4] a,
    %d)
}
""",
    "spaces in shapes": """HloModule m
ENTRY e {
  p = f32[4, 2] {1, 0} parameter(0)
  ROOT n = f32 [4,/* rows */2]{1,0} negate(p)
}
""",
    "comments everywhere": """// x = f32[] all-reduce(y)
HloModule /* m { */ m // ENTRY
ENTRY // e (
  e /* " */ { // x = f32[] all-reduce(p)
  p /**/ = /* ( */ f32[4] /* all-reduce(p) */ parameter(0) // )
  ROOT /* { */ r = f32[4] negate // (
    (p /* ) */), /* , index=3 */ metadata= /* { */ {op_name="// no comment"}
  /* } */ }
""",
    "strings over several lines": """HloModule m
ENTRY e {
  p = f32[4] parameter(0)
  k = f32[4] custom-call(p), custom_call_target="k", backend_config="
  %x = f32[4] all-reduce(%p), replica_groups={}
  ROOT %y = f32[4] negate(%x)
}
"
  ROOT r = f32[4] custom-call(k), custom_call_target="ptx", backend_config={name = "k", source = "
.visible .entry add(.param .b64 a) {
  %r1 = add.s32 %r2, %r3;
}", grid = [1, 2}
}
""",
    "a literal attribute": """HloModule m
ENTRY e {
  p = f32[4] parameter(0)
  j = f32[4] custom-call(p), custom_call_target="j", literal=(s32[2]{0} {1, 2}, pred[] true)
  ROOT k = f32[4] custom-call(j), custom_call_target="k", literal=s32[2]{0} {1, 2}
}
""",
    "elements of collectives": """HloModule m, num_partitions=8
add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = f32[] add(a, b) }
ENTRY e { p = f32[4] parameter(0)
  r = f32[4] all-reduce(p), metadata={op_name="r"}, to_apply=add,
    replica_groups=[4,2]<=[2,
      4]T(1,0), channel_id=1,
    use_global_device_ids=true g = f32[8] all-gather(r), dimensions={0}, replica_groups={{0,1},
      {2,3},{4,5},{6,7}}, channel_id=2, use_global_device_ids=true ROOT q = f32[8]
    collective-permute(g), source_target_pairs={{0,1}
    ,{1,0}} , channel_id=3
}
""",
}

NESTED = """HloModule m
ENTRY e {
  p = f32[4] parameter(0)
  q = f32[4] parameter(1)
  ROOT r = f32[4] add(f32[4] negate(p), f32[4] multiply(%q, f32[4] negate(f32[4] constant({1, 2, 3, 4}))))
}
"""
