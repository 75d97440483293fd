"""Every function that reads a response, a template or a file's content is in the tests of growth, or is exempt for a
reason. Which functions these are is found in the code, and which are in the tests by running those."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

from tests.faults.test_growth import ENDS, READERS, VERIFIERS, WORST, verified
from tests.house.layout import ROOT

FOLDERS = ("mmrl/rewards", "mmrl/runtime", "mmrl/serving", "mmrl/generation", "tasks", "sims")
CONTENTS = {"text", "response", "line", "body", "data", "answer", "gold", "template", "source", "expression"}
TYPES = {"str", "bytes", "str | None", "bytes | str", "str | bytes"}
LENGTH = 4_096  # characters
REACHED = 4_000  # characters: a function that got no more than a piece of a text was not tested by it

EXEMPT = {
    "passes it on, or asks for its length or one piece of it": {
        "generation.vllm.client:Server._read",
        "rewards.adapters.signatures:_completion_messages",
        "rewards.services.http:_exchange",
        "rewards.services.http:post",
        "runtime.progress:Display.line",
        "runtime.lazy_imports:Deferred.__init__",
        "serving.chat:BadRequest.__init__",
        "serving.chat:ChatServer.complete",
        "serving.robot:RobotServer._answer",
        "sims.turns.cards:CardGame._shown",
        "sims.turns.dialogue:Dialogue.answer",
        "sims.turns.dialogue:Dialogue.cut",
        "sims.turns.environment:Environment.step",
        "sims.turns.openenv:OpenEnvWorld.step",
        "sims.turns.processes:RemoteEnvironment.step",
        "sims.turns.recorded:RecordedEnvironment.step",
        "sims.turns.timed:TimedEnvironment.step",
        "sims.turns.timed:UnmadeEnvironment.step",
        "sims.turns.tools:ToolEnvironment.step",
        "sims.turns.tools:_with_system",
        "sims.turns.verifiers:VerifiersWorld.step",
        "sims.turns.verifiers:called",
        "tasks.image_generation.rewriting:RewriterPrompts.__init__",
        "tasks.visual_qa.data.conversations:ConversationFields._response",
    },
    "is the name of a column or an option of the configuration": {
        "tasks.visual_qa.data.columns:Columns._invert",
        "tasks.visual_qa.data.columns:Columns._letter",
        "tasks.visual_qa.data.columns:Columns.merge",
        "tasks.visual_qa.reading.fields:Fields.from_columns",
        "rewards.parsing.typography:_format_fraction",
    },
    "is parsed by one call of a library in C (json, msgpack, zip), in time linear in its length": {
        "generation.vllm.client:_parse_json",
        "generation.weight_sync.buckets:read_header",
        "rewards.credit:_json",
        "rewards.credit:_parse_call",
        "rewards.services.http:_arrays",
        "rewards.services.http:_json_object",
        "serving.arrays:unpack",
        "serving.chat:ChatServer.parse_request",
        "serving.robot:RobotServer.infer",
        "sims.turns.openenv:OpenEnvWorld._action",
        "tasks.manipulation.lerobot:_parsed",
    },
    "counts or splits it at a fixed text, by one call of a method of str": {
        "sims.turns.gymnasium:GymnasiumWorld.step",
        "tasks.visual_qa.data.conversations:ConversationFields._split_at_markers",
        "tasks.visual_qa.reading.fields:Fields._check_markers",
    },
    "is a match of a pattern, whose length the pattern bounds": {
        "rewards.parsing.boxes:_parsed",
        "rewards.parsing.units:_unit",
    },
    "is a right answer of the user's data, read by functions that are tested": {
        "rewards.credit:several_choices.<locals>.gold_letters",
        "rewards.programs.solids:SolidCode._build_gold",
        "rewards.verifiers:exact_match.<locals>.normalized_gold",
        "rewards.verifiers:multiple_choice.<locals>.gold_choice",
        "rewards.verifiers:numeric.<locals>.gold_number",
    },
    "runs in a process with a time limit": {
        "rewards.mathematics:math.<locals>.parse_math",
        "rewards.mathematics:_with_delimiters",
        "rewards.programs.executors:_run",
        "rewards.programs.executors:_run_with_input",
        "tasks.data.video_files:VideoFiles._read_ffmpeg",
    },
}


def parsers() -> dict[str, list[str]]:
    """The functions with a parameter that is the content of something, as module:Class.function; and its names."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name, node in functions(ast.parse(path.read_text()), ""):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [one.arg for one in arguments if one.arg in CONTENTS and annotated(one) in TYPES]
                if names:
                    found[f"{module(path)}:{name}"] = names
    return found


def annotated(argument: ast.arg) -> str:
    return "" if argument.annotation is None else ast.unparse(argument.annotation)


def module(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("mmrl.")


def functions(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """By qualified name, those within functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield owner + child.name, child
            yield from functions(child, f"{owner}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{owner}{child.name}.")
        elif isinstance(child, ast.stmt):
            yield from functions(child, owner)


def reached(wanted: dict[str, list[str]]) -> set[str]:
    """Which of the functions get a long text while the readers and verifiers of the growth tests run."""
    found: set[str] = set()
    folders = {str(ROOT / folder): folder for folder in FOLDERS} | {
        str(ROOT / "mmrl" / folder): folder
        for folder in ("tasks", "sims")  # a checkout may have them as links
    }
    names: dict[int, str | None] = {}  # of a function, by the id of its code: its hash takes long
    codes = []  # kept, so that no other gets the id of one

    def named(code) -> str | None:
        for folder, place in folders.items():
            if code.co_filename.startswith(folder + "/"):
                parts = f"{place}{code.co_filename.removeprefix(folder)}".removesuffix(".py").replace("/", ".")
                return f"{parts.removeprefix('mmrl.')}:{code.co_qualname}"
        return None

    def look(frame, event, argument):
        if event != "call":
            return
        code = frame.f_code
        if id(code) not in names:
            names[id(code)] = named(code)
            codes.append(code)
        name = names[id(code)]
        if name in wanted and name not in found:
            contents = (frame.f_locals.get(one) for one in wanted[name])
            if any(isinstance(one, str | bytes) and len(one) >= REACHED for one in contents):
                found.add(name)

    for read in [*READERS.values(), *map(verified, VERIFIERS)]:
        for piece, end in product(WORST, ENDS[::3]):
            text = (piece * LENGTH)[:LENGTH] + end
            sys.setprofile(look)
            try:
                read(text)
            finally:
                sys.setprofile(None)
    return found


# In a process of its own: threads that other tests have left behind would slow it down.
REACHED_IN = "import json; from tests.faults.test_every_parser import *; print(json.dumps([*reached(parsers())]))"


def test_every_parser_is_in_the_tests_of_growth():
    wanted, exempt = parsers(), [name for names in EXEMPT.values() for name in names]
    assert len(wanted) > 80 and len(set(exempt)) == len(exempt)
    assert set(exempt) - wanted.keys() == set()  # a function that is gone, or has no such parameter
    done = subprocess.run([sys.executable, "-c", REACHED_IN], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = set(json.loads(done.stdout))
    assert wanted.keys() - found - set(exempt) == set()  # add a reader to READERS in test_growth.py, or a reason
    assert found & set(exempt) == set()  # in the tests after all


def test_a_new_parser_would_be_found(tmp_path):
    text = "class A:\n    def read(self, text: str): ...\ndef f():\n    if 1:\n        def g(line: bytes): ...\n"
    assert [name for name, _ in functions(ast.parse(text), "")] == ["A.read", "f", "f.<locals>.g"]
    known = parsers()
    assert known["sims.turns.tools:json_call"] == ["response"] and "runtime.jsonl:parsed" in known
