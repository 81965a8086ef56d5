"""Tools as TypeScript: the published layout, to the character."""

import json

from conversations import tool

from k26jax.text.declare import declare_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.\nUse metric.",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "unit": {"type": "string", "enum": ["c", "f"]},
                "days": {"type": "integer", "minimum": 1, "default": 3},
                "city": {"type": "string", "description": "City name", "maxLength": 80},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
}
DECLARED = """# Tools

## functions
namespace functions {
// Get the weather.
// Use metric.
type get_weather = (_: {
  // City name
  // maxLength: 80
  city: string,
  // minimum: 1
  // Default: 3
  days?: number,
  tags?: Array<string>,
  unit?: "c" | "f"
}) => any;
}
"""


def body(properties: dict, **schema) -> str:
    """Returns the type of a function's argument."""
    text = declare_tools([tool("f", properties, **schema)])
    start, end = "namespace functions {\n", "\n}\n"
    assert start in text
    assert text.endswith(end)
    return text.partition(start)[2].removesuffix(end)


def test_the_example_of_the_format():
    assert declare_tools([WEATHER]) == DECLARED


def test_functions_follow_each_other_line_by_line():
    text = declare_tools([tool("a"), {"type": "function", "function": {"name": "b"}}])
    assert text.endswith("{\ntype a = (_: {}) => any;\ntype b = (_: {}) => any;\n}\n")


def test_types_of_every_kind():
    properties = {
        "a_any": {},
        "b_true": True,
        "c_false": False,
        "d_union": {"type": ["integer", "array", "object", "null"]},
        "e_either": {"anyOf": [{"type": "integer"}, {"enum": ["x", 1, None, True]}]},
        "f_map": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "g_closed": {"type": "object", "properties": {"x": {}}, "additionalProperties": False},
        "h_list": {"type": "array", "minItems": 1, "maxItems": 3},
        "i_text": {"type": "string", "pattern": "^a", "minLength": 1, "default": "é"},
        "j_number": {"type": "number", "maximum": 2, "default": False},
    }
    assert (
        body(properties, required=["j_number"])
        == """type f = (_: {
  // maximum: 2
  // Default: False
  j_number: number,
  a_any?: any,
  b_true?: any,
  c_false?: null,
  d_union?: number | Array<any> | {} | null,
  e_either?: number | "x" | 1 | None | True,
  f_map?: {
    [k: string]: boolean
  },
  g_closed?: {
    x?: any,
    [k: string]: never
  },
  // maxItems: 3, minItems: 1
  h_list?: Array<any>,
  // minLength: 1, pattern: ^a
  // Default: "é"
  i_text?: string
}) => any;"""
    )


def test_items_with_comments_and_descriptions_with_empty_lines():
    item = {"type": "object", "description": "One.\n\nTwo.", "properties": {"x": {"type": "null"}}}
    assert (
        body({"list": {"type": "array", "items": item}})
        == """type f = (_: {
  list?: Array<
    // One.

    // Two.
    {
      x?: null
    }
  >
}) => any;"""
    )


def test_references_become_interfaces():
    node = {
        "type": "object",
        "description": "A node.",
        "properties": {"n": {"$ref": "#/$defs/Node"}},
    }
    properties = {"root": {"$ref": "#/$defs/Node"}, "again": {"$ref": "#"}}
    assert (
        body(properties, required=["root"], **{"$defs": {"Node": node}})
        == """interface parameters {
  again?: parameters,
  root: Node
}
// A node.
interface Node {
  n?: Node
}
type f = (_: parameters) => any;"""
    )


def test_a_schema_without_typescript_makes_all_of_it_compact_json():
    for odd in ({"oneOf": []}, {"$ref": "#/definitions/x"}, {"type": "string", "enum": [1]}, 5):
        text = declare_tools([WEATHER, tool("f", {"p": odd})])
        declared = json.loads(text)
        assert declared[1]["function"]["parameters"]["properties"]["p"] == odd
        assert text == json.dumps(declared, separators=(",", ":"), sort_keys=True)
