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
from typing import Any

PLAIN: dict[type, Callable[[Any], str]] = {str: str.__str__, float: float.__repr__, int: int.__repr__}
"""How a value is written that may be of a subclass."""
LIBRARY: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, list, bytes),
    "bytearray": (bytearray, list, bytearray),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts)),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda p: timedelta(*p)),
}
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
)
OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in ARITHMETIC},
    **{name: getattr(operator, f"__{name}__") for name in ("neg", "pos", "abs", "invert")},
    **{name: getattr(operator, f"__{name}__") for name in ("getitem", "setitem", "delitem", "contains")},
    **{"len": len, "next": next, "iter": iter, "str": str, "repr": repr, "bool": bool, "hash": hash},
    **{"int": int, "float": float, "index": operator.index, "round": round},
    **{"enter": lambda a: a.__enter__(), "exit": lambda a, *error: a.__exit__(*error)},
}
"""What an action with the name of a special method does."""
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge")}
USUAL = "bisect", "collections", "functools", "heapq", "itertools", "typing"
"""Modules whose names a program has, as the sites of such tasks have them; these and MORE are there as modules, too."""
MORE = "copy", "math", "operator", "re", "string", "sys"


class Unsupported(BaseException):  # tests that catch exceptions do not catch it
    """Tests give the program something that does not travel, so they say nothing about it."""


class Ended(BaseException):
    """The other process has ended, or does not keep to the protocol."""


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
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update({key: value for key, value in names.items() if not key.startswith("__")})
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _kind(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type):
        return f"class {'error' if issubclass(value, BaseException) else 'object'} {value.__module__}"
    return "value"


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
    """The result of a request: `get` an attribute, `call`, or an operator, of an object by its number."""
    action, number, *operands = request
    try:
        target = objects[number]
        given = [decoded(operand, objects.__getitem__) for operand in operands]
        if action == "get":
            value = getattr(target, given[0])
        elif action == "set":
            setattr(target, given[0], given[1])
            value = None
        elif action == "call":
            value = target(*given[0], **given[1])
        elif action == "plain":
            return {"value": encoded(target, objects, of_program=False), "changed": []}
        elif action in COMPARISONS:
            value = bool(COMPARISONS[action](target, given[0]))
        else:
            value = OPERATORS[action](target, *given)
        changed = [encoded(operand, objects) for operand in given]
        return {"value": encoded(value, objects), "changed": changed}
    except Exception as error:
        return {"error": type(error).__name__, "of": type(error).__module__, "text": str(error)[:1000]}


# Values -----------------------------------------------------------------------------------------------------------


def encoded(value: Any, objects: Objects, of_program: bool = True) -> Any:
    """A value as JSON types: itself, or [name of its type, content]. Others are added to `objects` and named.

    Args: of_program: whether a value whose class is the program's is an object.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, Remote):
        return ["object", value._number]
    if of_program and type(value).__module__ == "solution":
        return ["object", objects.number(value), type(value).__name__, "solution"]
    for kind, written in PLAIN.items():
        if isinstance(value, kind):
            return [kind.__name__, written(value)]
    if isinstance(value, dict):
        return ["dict", [[encoded(key, objects), encoded(part, objects)] for key, part in dict.items(value)]]
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [encoded(part, objects) for part in kind.__iter__(value)]]
    for name, (kind, content, _) in LIBRARY.items():
        if isinstance(value, kind):
            return [name, content(value)]
    if type(value).__module__ == "numpy":
        content = encoded(value.tolist(), objects)
        return ["numpy", [content, str(value.dtype)]] if value.ndim else content
    return ["object", objects.number(value), type(value).__name__, type(value).__module__]


def decoded(content: Any, named: Callable[..., Any]) -> Any:
    """The value of `encoded`. Args: named: what stands for an object, from its number, type and module."""
    if content is None or isinstance(content, bool):
        return content
    name, inner, *rest = content
    if name == "object":
        return named(inner, *rest)
    if name == "str":
        return inner
    if name in ("int", "float"):
        return getattr(builtins, name)(inner)
    if name == "dict":
        return {decoded(key, named): decoded(part, named) for key, part in inner}
    if name in CONTAINERS:
        return CONTAINERS[name](decoded(part, named) for part in inner)
    if name == "numpy":
        return importlib.import_module("numpy").array(decoded(inner[0], named), inner[1])
    return LIBRARY[name][2](inner)


# The tests' side ---------------------------------------------------------------------------------------------------


class Peer:
    """The program, asked over a socket. Args: descriptor: of the socket."""

    def __init__(self, descriptor: int):
        sys.set_int_max_str_digits(0)
        self._channel = socket.socket(fileno=descriptor).makefile("rwb")
        self._errors: dict[str, type[Exception]] = {}
        self._classes: dict[str, Kind] = {}
        self._remotes: dict[int, Remote] = {}
        self._attributes: deque[tuple[Any, Any]] = deque(maxlen=8)  # containers that were asked for, and their content

    def module(self) -> types.ModuleType:
        """The module `solution`, whose names stand for those of the program. Raises Ended if it could not be loaded."""
        module = types.ModuleType("solution")
        for name, kind in self._receive().items():
            word, *rest = kind.split(" ")
            if word == "module":
                if importlib.util.find_spec(rest[0].partition(".")[0]) is not None:
                    setattr(module, name, importlib.import_module(rest[0]))
            elif word == "class" and rest[0] == "error":
                setattr(module, name, self._error(name))
            elif word == "class":
                cls = self._class(name, rest[1])
                cls._origin = self.ask("get", 0, name)
                setattr(module, name, cls)
            else:
                setattr(module, name, self.ask("get", 0, name))
        return module

    def ask(self, action: str, number: int, *operands: Any) -> Any:
        """The result of an action on an object of the program. Raises what the program raised, Unsupported, Ended."""
        if any(encoded(value, _Unknown()) != content for value, content in self._attributes):
            raise Unsupported("the tests change a container that is an attribute of the program's")
        sent = [encoded(operand, _Unknown()) for operand in operands]
        try:
            self._channel.write(json.dumps([action, number, *sent]).encode() + b"\n")
            self._channel.flush()
        except OSError:
            raise Ended from None
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
            self._attributes.append((value, encoded(value, _Unknown())))
        return value

    def _receive(self) -> Any:
        line = self._channel.readline(2**26)
        try:
            return json.loads(line)
        except ValueError:
            raise Ended from None

    def _named(self, number: int, name: str, module: str) -> Remote:
        if number not in self._remotes:
            made: Any = self._class(name, module)
            self._remotes[number] = object.__new__(made)
            object.__setattr__(self._remotes[number], "_number", number)
        return self._remotes[number]

    def _class(self, name: str, module: str) -> Kind:
        key = f"{module}.{name}"
        if key not in self._classes:
            self._classes[key] = Kind(name, (Remote,), {"_peer": self, "_origin": None, "__doc__": DOC})
        return self._classes[key]

    def _error(self, name: str) -> type[Exception]:
        return self._errors.setdefault(name, type(name, (Exception,), {}))


class _Unknown(Objects):
    """Objects of the tests, which do not travel."""

    def number(self, value: Any) -> int:
        raise Unsupported(f"the tests pass a {type(value).__name__} to the program")


class Kind(type):
    """The class of an object of the program, whose attributes are those of the program's class."""

    _origin: Any

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or cls._origin is None:
            raise AttributeError(name)
        return getattr(cls._origin, name)


class Remote(metaclass=Kind):
    """An object of the program. Its class stands for the program's class and makes its instances."""

    _peer: Peer
    _origin: Any
    _made = False
    """Whether the tests make objects of this class."""
    _number: int

    def __init_subclass__(cls) -> None:
        if "_origin" not in vars(cls):
            raise Unsupported(f"the tests derive {cls.__name__} from a class of the program")

    def __new__(cls, *values: Any, **options: Any) -> Any:
        cls._made = True
        return cls._origin(*values, **options)

    def __init__(self, *values: Any, **options: Any):
        """The program's class has made the object."""

    def __call__(self, *values: Any, **options: Any) -> Any:
        lists = list(values)
        return self._peer.ask("call", self._number, lists, options)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, value)

    def __contains__(self, value: Any) -> bool:
        """The program decides it for its own objects, and for those of a class that the tests make objects of. For what
        else a function returns the tests look through it, as else the program would decide what is right.
        """
        if isinstance(value, Remote) or self._made:
            return self._peer.ask("contains", self._number, value)
        return any(part == value for part in self._peer.ask("iter", self._number))

    def _plain(self) -> Any:
        """The value that an object of a class such as `class Stack(list)` derives from; else the object."""
        return self._peer.ask("plain", self._number)


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *operands: self._peer.ask(name, self._number, *operands)


def _on_values(name: str, is_right: bool = False) -> Callable[[Remote, Any], Any]:
    """A comparison or arithmetic. The program does it for two of its objects. With a value it is done here on what the
    object derives from, and fails if that is no value: else the program would decide what is right.

    Args: is_right: whether the object is the right operand.
    """
    function = getattr(operator, f"__{name}__")

    def result(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._peer.ask(name, self._number, other)
        plain = self._plain()
        if isinstance(plain, Remote):
            return NotImplemented
        return function(other, plain) if is_right else function(plain, other)

    return result


for _name in OPERATORS.keys() - {*ARITHMETIC, "contains"}:
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in (*COMPARISONS, *ARITHMETIC):
    setattr(Remote, f"__{_name}__", _on_values(_name))
for _name in ARITHMETIC:
    setattr(Remote, f"__r{_name}__", _on_values(_name, is_right=True))
DOC = property(lambda self: self._peer.ask("get", self._number, "__doc__"))


def update(value: Any, now: Any) -> None:
    """Changes a list, dictionary or set of the tests as the program changed what it got of it."""
    if type(value) is not type(now):
        return
    if isinstance(value, list | tuple) and len(value) == len(now):
        for old, new in zip(value, now, strict=True):
            update(old, new)
    if isinstance(value, list):
        kept = [isinstance(part, list | dict | set | Remote) for part in value] if len(value) == len(now) else []
        value[:] = [old if keep else new for old, new, keep in zip(value, now, kept, strict=True)] if kept else now
    elif isinstance(value, dict | set):
        value.clear()
        value.update(now)
