"""Objects of a program in another process: what its functions get and return travels as values, all else stays there.

Values are None, numbers, text, bytes and the containers of them; what derives from them in a library travels as what it
derives from, so a value that arrives compares as Python's own types do. Any other object, and one of the program's own
classes, is named by a number and asked for by its owner. The standard library only: this runs in the sandbox.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import json
import operator
import socket
import sys
import types
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from importlib.machinery import SourceFileLoader
from typing import Any

TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "str": (str, str.__str__, str),
    "float": (float, float.__repr__, float),
    "int": (int, int.__repr__, int),
    "complex": (complex, complex.__repr__, complex),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "timedelta": (
        timedelta,
        lambda t: f"{t.days} {t.seconds} {t.microseconds}",
        lambda text: timedelta(*map(int, text.split())),
    ),
    "range": (range, lambda r: f"{r.start} {r.stop} {r.step}", lambda text: range(*map(int, text.split()))),
}
"""Types whose values travel as text, how it is written, and how it is read."""
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
COMPARISONS = "eq", "lt", "le", "gt", "ge"
ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
)
FORWARDED: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in ("neg", "pos", "abs", "invert", "index")},
    **{name: getattr(operator, f"__{name}__") for name in ("getitem", "setitem", "delitem")},
    **{kind.__name__: kind for kind in (len, next, iter, str, repr, bool, hash, int, float, round)},
    **{"enter": lambda a: a.__enter__(), "exit": lambda a, *error: a.__exit__(*error)},
}
"""What the program does for a special method of its object."""
ACTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in (*ARITHMETIC, *COMPARISONS)},
    **FORWARDED,
    **{"get": getattr, "set": setattr, "call": lambda function, values, options: function(*values, **options)},
    **{"contains": operator.contains, "is_instance": lambda kind, value: isinstance(value, kind)},
}
USUAL = "bisect", "collections", "functools", "heapq", "itertools", "typing"
"""Modules whose names a program has, as the sites of such tasks have them; these and MORE are there as modules, too."""
MORE = "copy", "math", "operator", "re", "string", "sys"


class Unsupported(BaseException):  # tests that catch exceptions do not catch it
    """Tests give the program something that does not travel, so they say nothing about it."""


# The program's side -----------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Loads /tmp/program.py as the module `solution` and answers requests until the other side is gone."""
    sys.set_int_max_str_digits(0)
    channel = socket.socket(fileno=descriptor).makefile("rwb")
    usual: dict[str, Any] = {}
    for name in (*USUAL, *MORE):
        usual[name] = importlib.import_module(name)
        usual |= {key: value for key, value in vars(usual[name]).items() if name in USUAL and not key.startswith("_")}
    solution = load("solution", "/tmp/program.py", usual)
    objects = Objects()
    objects.number(solution)
    reply: Any = {
        name: _kind(value)
        for name, value in vars(solution).items()
        if not name.startswith("__") and (isinstance(value, types.ModuleType) or value is not usual.get(name))
    }
    while True:
        channel.write(json.dumps(reply).encode() + b"\n")
        channel.flush()
        line = channel.readline()
        if not line:
            return
        reply = _answer(json.loads(line), objects)


def load(name: str, path: str, names: dict[str, Any]) -> types.ModuleType:
    """A file as a module, in which these names are there already."""
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update({key: value for key, value in names.items() if not key.startswith("__")}, __file__=path)
    SourceFileLoader(name, path).exec_module(module)
    return module


def _kind(value: Any) -> str:
    """The name of a module, "error" for a class of exceptions, nothing for anything else."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    return "error" if isinstance(value, type) and issubclass(value, BaseException) else ""


class Objects(list[Any]):
    """The objects that the other process knows by their number; one object has one number."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}

    def number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self)
            self.append(value)
        return self._numbers[id(value)]


def _answer(request: list[Any], objects: Objects) -> dict[str, Any]:
    """The result of a request: an action on an object by its number, or the value that it derives from."""
    action, number, *operands = request
    try:
        target = objects[number]
        if action == "plain":
            return {"value": encoded(target, objects.number, of_program=False), "changed": []}
        given = [decoded(operand, lambda number, _: objects[number]) for operand in operands]
        value = encoded(ACTIONS[action](target, *given), objects.number)
        return {"value": value, "changed": [encoded(operand, objects.number) for operand in given]}
    except Exception as error:
        return {"error": type(error).__name__, "of": type(error).__module__, "text": str(error)[:1000]}


# Values -----------------------------------------------------------------------------------------------------------


def encoded(value: Any, number: Callable[[Any], int], of_program: bool = True) -> Any:
    """A value as JSON types: itself, or [name of its type, content]; for others ["object", number, name of its type].

    Args: of_program: whether a value whose class is the program's is an object.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, Remote):
        return ["object", value._number, ""]
    if type(value).__module__ == "solution" and of_program:
        return ["object", number(value), type(value).__name__]
    for name, (kind, written, _) in TEXTS.items():
        if isinstance(value, kind):
            return [name, written(value)]
    if isinstance(value, dict):
        return ["dict", [[encoded(key, number), encoded(part, number)] for key, part in dict.items(value)]]
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [encoded(part, number) for part in kind.__iter__(value)]]
    if type(value).__module__ == "numpy":
        content = encoded(value.tolist(), number)
        return ["numpy", [content, str(value.dtype)]] if value.ndim else content
    return ["object", number(value), "" if isinstance(value, type) else type(value).__name__]


def decoded(content: Any, named: Callable[[int, str], Any]) -> Any:
    """The value of `encoded`. Args: named: what stands for an object, from its number and the name of its type."""
    if content is None or isinstance(content, bool):
        return content
    name, inner, *rest = content
    if name == "object":
        return named(inner, *rest)
    if name == "dict":
        return {decoded(key, named): decoded(part, named) for key, part in inner}
    if name in CONTAINERS:
        return CONTAINERS[name](decoded(part, named) for part in inner)
    if name == "numpy":
        return importlib.import_module("numpy").array(decoded(inner[0], named), inner[1])
    return TEXTS[name][2](inner)


# The tests' side ---------------------------------------------------------------------------------------------------


class Peer:
    """The program, asked over a socket. Args: descriptor: of the socket."""

    def __init__(self, descriptor: int):
        sys.set_int_max_str_digits(0)
        self._channel = socket.socket(fileno=descriptor).makefile("rwb")
        self._errors: dict[str, type[Exception]] = {}
        self._remotes: dict[int, Remote] = {}
        self._attributes: deque[tuple[Any, Any]] = deque(maxlen=8)  # containers that were asked for, and their content
        self.made: set[str] = set()
        """Names of the program's classes of which the tests make objects."""

    def module(self) -> types.ModuleType:
        """The module `solution`, whose names stand for the program's. Raises SystemExit if it could not be loaded."""
        module = types.ModuleType("solution")
        for name, kind in self._receive().items():
            if kind == "error":
                setattr(module, name, self._error(name))
            elif not kind:
                setattr(module, name, self.ask("get", 0, name))
            elif importlib.util.find_spec(kind.partition(".")[0]) is not None:
                setattr(module, name, importlib.import_module(kind))
        return module

    def ask(self, action: str, number: int, *operands: Any) -> Any:
        """The result of an action on an object of the program.

        Raises what the program raised, Unsupported, or SystemExit where the program has ended.
        """
        if any(encoded(value, _no_number) != content for value, content in self._attributes):
            raise Unsupported("the tests change a container that is an attribute of the program's")
        sent = [encoded(operand, _no_number) for operand in operands]
        try:
            self._channel.write(json.dumps([action, number, *sent]).encode() + b"\n")
            self._channel.flush()
        except OSError:
            raise SystemExit from None
        reply = self._receive()
        if "error" in reply:
            known = getattr(builtins, reply["error"], None)
            is_known = isinstance(known, type) and issubclass(known, Exception) and reply["of"] == "builtins"
            kind: Any = known if is_known else self._error(reply["error"])
            raised = kind(reply["text"])
            raised.of_program = True
            raise raised
        for operand, now in zip(operands, reply["changed"], strict=True):
            update(operand, decoded(now, self._named))
        value = decoded(reply["value"], self._named)
        if action == "get" and isinstance(value, list | dict | set):
            self._attributes.append((value, encoded(value, _no_number)))
        return value

    def _receive(self) -> Any:
        line = self._channel.readline(2**26)
        try:
            return json.loads(line)
        except ValueError:
            raise SystemExit from None

    def _named(self, number: int, kind: str) -> Remote:
        return self._remotes.setdefault(number, Remote(self, number, kind))

    def _error(self, name: str) -> type[Exception]:
        return self._errors.setdefault(name, type(name, (Exception,), {}))


def _no_number(value: Any) -> int:
    raise Unsupported(f"the tests pass a {type(value).__name__} to the program")


class Remote:
    """An object of the program, also a class or a function. Args: kind: the name of its class; empty for a class."""

    _peer: Peer
    _number: int
    _kind: str

    def __init__(self, peer: Peer, number: int, kind: str):
        vars(self).update(_peer=peer, _number=number, _kind=kind)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> Any:
        raise Unsupported("the tests derive a class from one of the program's")

    def __call__(self, *values: Any, **options: Any) -> Any:
        result = self._peer.ask("call", self._number, list(values), options)
        if not self._kind and isinstance(result, Remote):
            self._peer.made.add(result._kind)
        return result

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, value)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._peer.ask("is_instance", self._number, value)

    def __contains__(self, value: Any) -> bool:
        """The program decides it for its own objects, and for those of a class that the tests make objects of. For what
        else a function returns the tests look through it, as else the program would decide what is right.
        """
        if isinstance(value, Remote) or self._kind in self._peer.made:
            return self._peer.ask("contains", self._number, value)
        return any(part == value for part in self._peer.ask("iter", self._number))

    def _plain(self) -> Any:
        """The value that an object of a class such as `class Stack(list)` derives from; else the object."""
        return self._peer.ask("plain", self._number)


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *operands: self._peer.ask(name, self._number, *operands)


def _on_values(name: str, is_right: bool = False) -> Callable[[Remote, Any], Any]:
    """An operator. The program does it for two of its objects. With a value it is done here on what the object derives
    from, and fails if that is no value: else the program would decide what is right.

    Args: is_right: whether the object is the right operand.
    """

    def result(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._peer.ask(name, self._number, other)
        plain = self._plain()
        if isinstance(plain, Remote):
            return NotImplemented
        return ACTIONS[name](other, plain) if is_right else ACTIONS[name](plain, other)

    return result


for _name in FORWARDED:
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in (*ARITHMETIC, *COMPARISONS):
    setattr(Remote, f"__{_name}__", _on_values(_name))
for _name in ARITHMETIC:
    setattr(Remote, f"__r{_name}__", _on_values(_name, is_right=True))


def update(value: Any, now: Any) -> None:
    """Changes a list, dictionary or set of the tests as the program changed what it got of it."""
    if type(value) is not type(now):
        return
    if isinstance(value, list | tuple) and len(value) == len(now):
        for old, new in zip(value, now, strict=True):
            update(old, new)
    if isinstance(value, list):
        value[:] = now
    elif isinstance(value, dict | set):
        value.clear()
        value.update(now)
