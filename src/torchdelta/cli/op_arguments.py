"""Arguments of an operator as they are typed: `f32[3, 4], i64(0, 10)[5], dim=1, 'mean', torch.bfloat16`.

The text looks like the arguments of a Python call, is parsed as such, and never evaluated. `read_arguments` returns a
description that JSON can hold; `operators/arguments.py` builds the values from it in a worker.
"""

from __future__ import annotations

import ast
import math
from typing import Any, TypeGuard

from torchdelta.errors import UsageError
from torchdelta.registry import nearest

_BITS = {"f": (16, 32, 64), "i": (8, 16, 32, 64), "u": (8, 16, 32, 64), "c": (64, 128)}
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
_SHORT = {f"{letter}{bits}": f"{_KINDS[letter]}{bits}" for letter, widths in _BITS.items() for bits in widths}
DTYPES = {
    **_SHORT,
    **{name: name for name in _SHORT.values()},
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("bool", "b8"), "bool"),
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}
_CONSTANTS = (
    *("strided", "sparse_coo", "sparse_csr"),
    *("contiguous_format", "channels_last", "channels_last_3d", "preserve_format"),
)
_NUMBERS = {"inf": math.inf, "nan": math.nan, "pi": math.pi}
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_MODIFIERS = ("no_grad", "requires_grad", "t", *_DEVICES)
_OPENING = "_("


def read_arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return descriptions of the positional arguments, in a list, and of the keyword arguments, by name.

    `text` is never evaluated. JSON can hold a description: `_Reader._value` has its forms. UsageError if it cannot be
    read.
    """
    reader = _Reader(text)
    try:
        return reader.read()
    except RecursionError:
        raise UsageError("--args: the arguments are nested too deeply to be read") from None


class _Reader:
    """Reads one text; every error names the column of the argument that is wrong."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.source = f"{_OPENING}{text}\n)"  # on its own line, because the text may end in a comment

    def read(self) -> tuple[list[Any], dict[str, Any]]:
        """Return descriptions of the positional arguments, in a list, and of the keyword arguments, by name.

        UsageError if the text does not parse, an argument cannot be described, or a name comes twice.
        """
        call = self._parsed()
        args = [self._value(node) for node in call.args]
        kwargs: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise self._wrong(keyword.value, "there is nothing to unpack: write name=value")
            if keyword.arg in kwargs:
                raise self._wrong(keyword.value, f"{keyword.arg} is given twice")
            kwargs[keyword.arg] = self._value(keyword.value)
        return args, kwargs

    def _parsed(self) -> ast.Call:
        """Parse the text as the arguments of a call, and return that call.

        UsageError, with the place if it is known, if it does not parse or if a bracket in it closes the call itself.
        """
        try:
            root = ast.parse(self.source, mode="eval").body
        except SyntaxError as error:
            if stray := self._stray_bracket():
                raise stray from None
            where = self._place(error.lineno or 1, (error.offset or 1) - 1)
            hint = "; a scalar tensor is f32[()]" if "[]" in self.text.replace(" ", "") else ""
            raise UsageError(f"--args: {self.text!r} cannot be read {where}: {error.msg}{hint}") from None
        except (ValueError, MemoryError) as error:
            raise UsageError(f"--args: {self.text!r} cannot be read: {error or type(error).__name__}") from None
        if not _is_whole(root):
            raise self._stray_bracket() or UsageError(f"--args: the brackets of {self.text!r} do not match")
        return root

    def _stray_bracket(self) -> UsageError | None:
        """Return an error, not raised, with the place of the first `)` before which the text reads as whole arguments.

        None if there is no such bracket, also if a mistake comes before it, as in `1 2)`.
        """
        for place, letter in enumerate(self.text):
            if letter == ")" and _reads(self.text[:place]):
                before = self.source[: len(_OPENING) + place]
                where = self._place(before.count("\n") + 1, len(before) - before.rfind("\n") - 1)
                return UsageError(f"--args: {self.text!r} cannot be read {where}: this bracket closes nothing")
        return None

    def _value(self, node: ast.expr) -> Any:
        """Return the description of one argument; UsageError if it is not one that can be described.

        A finite real number, a text, None and a truth value describe themselves, and a list is a list of descriptions.
        All else is a dict with the kind as its one key: `tensor`, `tuple`, `dict` (a list of pairs), `complex`, `float`
        (if not finite), `dtype`, `torch` (the name of a constant) or `device`.
        """
        match node:
            case ast.Constant(value=value) if value is None or isinstance(value, (bool, int, float, complex, str)):
                return _plain(value)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()) | ast.BinOp(op=ast.Add() | ast.Sub()):
                return _plain(self._number(node))
            case ast.List():
                return [self._value(each) for each in node.elts]
            case ast.Tuple():
                return {"tuple": [self._value(each) for each in node.elts]}
            case ast.Dict():
                return {
                    "dict": [self._item(key, value, node) for key, value in zip(node.keys, node.values, strict=True)]
                }
            case ast.Name(id=name) if name in _NUMBERS:
                return _plain(_NUMBERS[name])
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return self._named_by_torch(node, name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="device")):
                return self._device(node)
            case ast.Subscript() | ast.Attribute():
                return {"tensor": self._tensor(node)}
            case ast.Name(id=name) if name in DTYPES:
                raise self._wrong(node, f"a scalar tensor is {name}[()], and a dtype is torch.{DTYPES[name]}")
            case ast.Call(func=ast.Name(id=name)) if name in DTYPES:
                raise self._wrong(node, f"a tensor has sizes, such as {self._segment(node)}[3, 4]")
            case ast.Name(id=name):
                raise self._wrong(node, f"it is not a known name; a string is {name!r}")
        raise self._wrong(
            node,
            "an argument is a tensor such as f32[3, 4], a number, a string, None, or a list, tuple or dict of them",
        )

    def _item(self, key: ast.expr | None, value: ast.expr, whole: ast.expr) -> list[Any]:
        """Return [key, description of the value] of one item of a dict.

        UsageError if the key is not a literal text, real number without a sign, or truth value, or if the value cannot
        be described. An unpacked dict, for which `key` is None, is one too; `whole` is the dict around it.
        """
        if key is None:
            raise self._wrong(whole, "there is nothing to unpack in a dict")
        if not isinstance(key, ast.Constant) or not isinstance(key.value, (str, int, float)):
            raise self._wrong(key, "the key of a dict is a string or a number")
        return [_plain(key.value), self._value(value)]

    def _number(self, node: ast.expr) -> complex:
        """Return the number that an expression stands for: an int, float or complex; UsageError if it is anything else.

        It may be a literal, or `inf`, `nan` or `pi`; with signs; or a real number plus or minus an imaginary literal.
        Nothing else is computed, and a truth value is not a number.
        """
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() | float() | complex() as value):
                return value
            case ast.Name(id=name) if name in _NUMBERS:
                return _NUMBERS[name]
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _NUMBERS:
                return _NUMBERS[name]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=complex() as imaginary)):
                return 0 - imaginary  # `-1j` is printed for a real part of 0, and Python would read -0
            case ast.UnaryOp(op=ast.USub()):
                return -self._number(node.operand)
            case ast.UnaryOp(op=ast.UAdd()):
                return self._number(node.operand)
            case ast.BinOp(
                op=ast.Add() | ast.Sub() as sign, left=left, right=ast.Constant(value=complex() as imaginary)
            ):
                real = self._number(left)
                if not isinstance(real, complex):
                    return real + imaginary if isinstance(sign, ast.Add) else real - imaginary
        raise self._wrong(node, "it is not a number; nothing is computed here")

    def _named_by_torch(self, node: ast.expr, name: str) -> Any:
        """Return the description of `torch.NAME`, where NAME is a number such as inf, a dtype, or one of `_CONSTANTS`.

        Those are layouts and memory formats. UsageError with the nearest names for any other name.
        """
        if name in _NUMBERS:
            return _plain(_NUMBERS[name])
        if name in DTYPES:
            return {"dtype": DTYPES[name]}
        if name in _CONSTANTS:
            return {"torch": name}
        raise self._wrong(node, nearest(name, (*dict.fromkeys(DTYPES.values()), *_CONSTANTS)))

    def _device(self, node: ast.Call) -> Any:
        """Return `{"device": NAME}` for a call `torch.device('NAME')`; UsageError if it has any other arguments."""
        match node:
            case ast.Call(args=[ast.Constant(value=str() as name)], keywords=[]):
                return {"device": name}
        raise self._wrong(node, "a device is torch.device('cpu')")

    def _tensor(self, node: ast.expr) -> dict[str, Any]:
        """Return the description of a tensor such as `f32(0, 1)[3, 4].t`: a dict that JSON can hold.

        It has `dtype`, `sizes`, `bounds` (None is the default range), `requires_grad`, `transposed` and `device`.
        Without modifiers, a tensor is on the CPU, and requires grad if its dtype is float or complex. UsageError if a
        part of it cannot be read.
        """
        if isinstance(node, ast.Attribute):
            return self._modified(self._tensor(node.value), node)
        if not isinstance(node, ast.Subscript):
            raise self._wrong(node, "a tensor is a dtype and its sizes, such as f32[3, 4]")
        dtype, bounds = self._dtype_and_bounds(node.value)
        has_gradient = dtype.startswith(("float", "bfloat", "complex"))
        return {
            "dtype": dtype,
            "sizes": self._sizes(node.slice),
            "bounds": bounds,
            "requires_grad": has_gradient,
            "transposed": False,
            "device": "cpu",
        }

    def _dtype_and_bounds(self, node: ast.expr) -> tuple[str, list[float] | None]:
        """Return the full name of a tensor's dtype, and the range of its values (see `_bounds`); None without a range.

        `node` is the part before the sizes: `f32`, `torch.float32` or `f32(0, 1)`. UsageError if it is not one, if the
        dtype is unknown, or if the range makes no sense.
        """
        if isinstance(node, ast.Call):
            dtype, earlier = self._dtype_and_bounds(node.func)
            if earlier is not None:
                raise self._wrong(node, "a tensor has one range")
            return dtype, self._bounds(node, dtype)
        match node:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="torch"), attr=name):
                if name not in DTYPES:
                    raise self._wrong(node, f"there is no such dtype: {nearest(name, DTYPES)}")
                return DTYPES[name], None
        raise self._wrong(node, "a tensor is a dtype and its sizes, such as f32[3, 4]")

    def _bounds(self, node: ast.Call, dtype: str) -> list[float]:
        """Return the two ends of a range such as `(0, 10)`: the least value, and the value below which all are.

        UsageError if there are not two numbers in increasing order, if the dtype is bool, or if `_bound` refuses one.
        """
        if len(node.args) != 2 or node.keywords:
            raise self._wrong(node, "a range of values is two numbers, such as i64(0, 10)[5]")
        if dtype == "bool":
            raise self._wrong(node, "truth values have no range")
        low, high = (self._bound(each, dtype) for each in node.args)
        if not low < high:
            raise self._wrong(node, f"no value is at least {low} and below {high}")
        return [low, high]

    def _bound(self, node: ast.expr, dtype: str) -> float:
        """Return one end of a range; UsageError if it is not a finite real number, or an integer dtype cannot have it.

        For an integer dtype it has to be an int from the dtype's least value to its largest plus 1, because the upper
        end of a range is not in it; it is never above 2**63 - 1.
        """
        number = self._number(node)
        if isinstance(number, complex) or not math.isfinite(number):
            raise self._wrong(node, "the bound of a range is a finite number")
        if "int" in dtype:
            bits = int(dtype.rpartition("int")[2])
            least, most = (0, 2**bits) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
            # values are drawn as int64 and converted then
            if not isinstance(number, int) or not least <= number <= min(most, 2**63 - 1):
                raise self._wrong(node, f"it is not a bound of {dtype}")
        return number

    def _sizes(self, node: ast.expr) -> list[int]:
        """Return the sizes between the brackets of a tensor, or an empty list for `()`.

        UsageError if one is not a whole number.
        """
        sizes = node.elts if isinstance(node, ast.Tuple) else [node]
        return [self._size(each) for each in sizes]

    def _size(self, node: ast.expr) -> int:
        """Return the size that a literal stands for; UsageError if it is not a whole number from 0."""
        match node:
            case ast.Constant(value=int() as size) if not isinstance(size, bool):
                return size
        raise self._wrong(node, "a size is a whole number, not less than 0")

    def _modified(self, tensor: dict[str, Any], node: ast.Attribute) -> dict[str, Any]:
        """Return a copy of a tensor's description with the modifier that `node` appends: `.t`, `.no_grad`, `.cuda`, …

        UsageError if there is no such modifier, or if the tensor cannot have it: `.t` needs two sizes or more, and
        `.requires_grad` a float or complex dtype.
        """
        name = node.attr
        if name not in _MODIFIERS:
            raise self._wrong(node, f"a tensor has no {name!r} here: {nearest(name, _MODIFIERS)}")
        if name in _DEVICES:
            return {**tensor, "device": name}
        if name == "t":
            if len(tensor["sizes"]) < 2:
                raise self._wrong(node, "only a tensor of two sizes or more can lie transposed")
            return {**tensor, "transposed": True}
        if name == "requires_grad" and not tensor["dtype"].startswith(("float", "bfloat", "complex")):
            raise self._wrong(node, f"{tensor['dtype']} has no gradients")
        return {**tensor, "requires_grad": name == "requires_grad"}

    def _wrong(self, node: ast.expr, why: str) -> UsageError:
        """Return, and do not raise, a UsageError with the text of a node, its place, and why it cannot be read."""
        where = self._place(node.lineno, len(self._line(node.lineno).encode()[: node.col_offset].decode()))
        return UsageError(f"--args: {self._segment(node)!r} cannot be read {where}: {why}")

    def _segment(self, node: ast.expr) -> str:
        """Return the text of a node, or the whole text if that is not known."""
        return ast.get_source_segment(self.source, node) or self.text

    def _place(self, line: int, column: int) -> str:
        """Return a place in the user's text in words: `at column 3`, `at line 2, column 3` or `at its end`.

        `line` (from 1) and `column` (from 0) are those of `source`, which has an opening bracket before the text.
        """
        if line > self.text.count("\n") + 1:  # the closing bracket, which is not the user's
            return "at its end"
        if line == 1:
            column -= len(_OPENING)
        on_line = f"line {line}, " if "\n" in self.text else ""
        return f"at {on_line}column {max(column, 0) + 1}"

    def _line(self, number: int) -> str:
        return self.source.splitlines()[number - 1]


def _reads(text: str) -> bool:
    """Tell whether the text parses as the arguments of one call."""
    try:
        return _is_whole(ast.parse(f"{_OPENING}{text}\n)", mode="eval").body)
    except (SyntaxError, ValueError, MemoryError):
        return False


def _is_whole(root: ast.expr) -> TypeGuard[ast.Call]:
    """Tell whether a parsed text is one call of a plain name: no bracket within the text closed that call too early."""
    return isinstance(root, ast.Call) and isinstance(root.func, ast.Name)


def _plain(value: Any) -> Any:
    """Return a constant as data that strict JSON can hold; all but complex and non-finite numbers unchanged.

    A complex number becomes `{"complex": [real, imaginary]}`; NaN and infinity become `{"float": text}`.
    """
    if isinstance(value, complex):
        return {"complex": [_plain(value.real), _plain(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # strict JSON has no such number
    return value
