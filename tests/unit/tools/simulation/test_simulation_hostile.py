"""``hvd-hetero simulate`` on hostile input: one line and exit code 2, or a result."""

import gzip
import json
import random
import re
import time
import warnings

import pytest
from report_runs import record

from hvd_hetero.policies import BSP
from hvd_hetero.tools.cli import commands as cli
from hvd_hetero.tools.simulation import Cluster, Compute, Worker

LONGEST_S = 20.0  # of one case, on a machine with other work; most take milliseconds

DESCRIPTION = {
    "": {"seed": "0", "measurement_noise": "0.01", "policies": '["bsp", "lb-bsp"]'},
    "training": {"global_batch": "24", "rounds": "6", "rounds_ahead": "1", "signal_ms": "0.1", "dataset": "100"},
    "network": {"kind": '"ring"', "latency_ms": "0.1", "bandwidth_mbps": "100", "message_mb": "1.0",
                "server_bandwidth_mbps": "100"},
    "[workers]": {"count": "2", "samples_per_s": "100", "fixed_ms": "5", "saturation": "4", "memory_limit": "8",
                  "bandwidth_mbps": "50", "availability": "{ at_s = [0, 30], share = [1.0, 0.4], period_s = 60 }",
                  "variation": '[{ kind = "jitter", sigma = 0.03 }]', "link": "{ share = [0.5] }",
                  "drivers": "{ known = true, lag_s = 0.25, noise = 0.02 }"},
}  # fmt: skip

VALUES = [
    "-1", "0", "-0.0", "1e-320", "-1e-9", "1e308", "1e12", "inf", "-inf", "nan", "true", '""', '"x"', '"\\u0000"', "[]",
    "{}", "[[]]", "[nan]", "[1e400]", '["é\\u2028"]', "[true]", "[0, 0]", "[0, nan]", "[1, 0.5]", "{ a = 1 }", "[{}]",
    "1979-05-27", "07:32:00", "9223372036854775807", "9223372036854775808", "1" + "0" * 400, "0x" + "f" * 9000,
    '"' + "a" * 5000 + '"', "[" * 3000, "{ share = [] }", "{ share = [1e300] }", "{ at_s = [0, 1], share = [1] }",
    "{ at_s = [nan], share = [1] }", "{ share = [1], period_s = 1e-300 }", "{ share = ['x'] }", "{ file = '.' }",
    "{ file = '/dev/zero', column = 'a', step_s = 1 }", "{ file = 'no.csv', column = 'a', step_s = 1 }",
    "{ file = 'zeros.csv.gz', column = 'a', step_s = 1 }", "{ file = 'cut.csv.gz', column = 'a', step_s = 1 }",
    "{ file = 'ragged.csv', column = 'b', step_s = 1 }", "{ file = 'words.csv', column = 'a', step_s = 1 }",
    "{ file = 'words.csv', column = 'c', step_s = 1 }", "{ file = 'good.csv', column = 'a', step_s = -1 }",
    "{ file = 'good.csv', column = 'a', step_s = 1, scale = 1e300 }",
    "{ file = 'empty.csv', column = 'a', step_s = 1 }",
    "{ file = 'good.csv', column = 'a', step_s = 1, where = 'a' }", "{ file = 'binary.csv', column = 'a', step_s = 1 }",
    "{ file = '" + "a" * 300 + "', column = 'a', step_s = 1 }", "[{ kind = 'jitter', sigma = 1e9 }]",
    "[{ kind = 'slow-down', most = 1e300 }]", "[{ kind = 'slow-down', probability = nan }]", "[{ kind = [] }]",
    "[{ kind = 'exponential', per = 'batch' }]", "[{ kind = 'recorded', file = 'good.csv', column = 'a' }]",
    "[{ kind = 'recorded', file = 'zero.csv', column = 'a' }]", "[{ kind = 'exponential', per = 7 }]", "[7]",
]  # fmt: skip

POLICIES = [
    "static", "''", "'bsp,,'", "bsp,bsp", "d-psgd", "matcha", "[", "[7]", "[[]]", "[{}]", "7",
    '["bsp", { name = "bsp" }]', '[{ name = "lb-bsp", label = "bsp" }]', '[{ name = "lb-bsp", label = "[/red]" }]',
    '[{ name = "lb-bsp", label = "[red]$x_{$" }]',
    '[{ name = "lb-bsp", label = "a\\nb" }]', '[{ name = "lb-bsp", label = 7 }]',
    '[{ name = "static", weights = [] }]', '[{ name = "static", weights = [1e308, 1, 1, 1] }]',
    '[{ name = "static", weights = [1000000000000, 1] }]', '[{ name = "static", weights = "12" }]',
    '[{ name = "lb-bsp", minimum = -1 }]', '[{ name = "lb-bsp", minimum = "x" }]',
    '[{ name = "lb-bsp", tolerance = nan }]',
    '[{ name = "lb-bsp", predictor = 7 }]', '[{ name = "lb-bsp", predictor = {} }]',
    '[{ name = "lb-bsp", device = [] }]',
    '[{ name = "lb-bsp", multiple_of = 0 }]', '[{ name = "lb-bsp", max_micro_batch = 0 }]',
    '[{ name = "non-blocking", micro_batches = 1000000000 }]', '[{ name = "non-blocking", scaling = 1 }]',
    '[{ name = "elastic-bsp", lookahead = 1000000000 }]', '[{ name = "elastic-bsp", updates = {} }]',
    '[{ name = "self-adaptive", total = 1000000000 }]', '[{ name = "self-adaptive", start = [[1], 2] }]',
    '[{ name = "self-adaptive", drift = nan }]', '[{ name = "self-adaptive", every = 0 }]',
    '[{ name = "bsp", sync = "d-psgd", more = 1 }]', "[" * 20000, '[{ name = "' + "a" * 5000 + '" }]', "\ud800", "λ",
    "[" + '"bsp",' * 100 + "]",
]  # fmt: skip


def written(tables):
    lines = []
    for name, settings in tables.items():
        lines += [f"[{name}]" if name else "", *(f"{key} = {value}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Series of all kinds beside the description."""
    tmp_path = tmp_path_factory.mktemp("cluster")
    (tmp_path / "good.csv").write_text("a\n1\n0.5\n")
    (tmp_path / "zero.csv").write_text("a\n1\n0\n")
    (tmp_path / "words.csv").write_text("a,b\n1,2\nx,3\n")
    (tmp_path / "ragged.csv").write_text("a,b\n1\n2,3,4\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    (tmp_path / "zeros.csv.gz").write_bytes(gzip.compress(b"0" * 40_000_000, 1))
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"a\n1\n")[:-9])
    return tmp_path


def ends_well(arguments, capsys):
    """Run it; returns the error, which is one line that is not too long, or nothing."""
    begin_s = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a result comes without them
        code = cli.main(["simulate", *map(str, arguments), "--json"])
    took_s = time.perf_counter() - begin_s
    out, error = capsys.readouterr()
    assert took_s < LONGEST_S, f"{took_s:.1f} s"
    if code == 0:
        json.loads(out)
        assert error == "", "a result without a warning"
        return ""
    assert (code, out) == (2, "")
    assert re.fullmatch(r"hvd-hetero: error: [^\n]{10,1200}\n", error), error
    return error


def test_any_value_of_any_setting_is_simulated_or_refused(folder, capsys):
    """Drawn by a seed: one or two settings of a description that works get a value that is wrong, or huge."""
    dice, path, refused = random.Random(0), folder / "cluster.toml", 0
    keys = [(table, key) for table, settings in DESCRIPTION.items() for key in settings]
    for number in range(90):
        tables = {name: dict(settings) for name, settings in DESCRIPTION.items()}
        for table, key in [keys[number % len(keys)], *dice.sample(keys, dice.randrange(2))]:
            tables[table][key] = dice.choice(VALUES)
            if dice.random() < 0.1:
                del tables[table][key]
        path.write_text(written(tables), encoding="utf-8", errors="surrogatepass")
        refused += bool(ends_well([path, "--rounds", 3] if number % 2 else [path], capsys))
    assert 45 < refused < 90, "most are wrong, and some are not"


@pytest.mark.parametrize("policies", POLICIES, ids=range(len(POLICIES)))
def test_any_list_of_policies_is_simulated_or_refused(policies, folder, capsys):
    (folder / "cluster.toml").write_text(written(DESCRIPTION))
    ends_well([folder / "cluster.toml", "--policies", policies], capsys)


FIGURES = [
    "null", "-1", "0", "1e308", "1e400", "NaN", "-Infinity", "true", '"x"', "[]", "{}", "[null, null]", "[1]", "[0, 0]",
    "[1, 2, 3]", "[-1, 1]", "[1e300, 1e300]", "[1e-300, 1e-300]", '["1", "2"]', "[true, true]", "[9007199254740993, 1]",
    "[0.5, 0.5]", "9" * 5000, "[" * 3000, '"\\ud800"', '"[/red]"', "[1e12, 1e12]", "99999999999", "[5, 7]",
]  # fmt: skip
HEADER = ["schema", "version", "policy", "workers", "global_batch", "headroom"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The lines of a run of two ranks."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    cluster = Cluster((Worker(Compute.at_speed(100.0)), Worker(Compute.at_speed(200.0))))
    record(path, cluster, BSP(), 12, 12)
    return path.read_text().splitlines()


def test_any_telemetry_is_replayed_or_refused(recorded, tmp_path, capsys):
    """Drawn by a seed: a figure of some lines is another one, a line is lost or cut, bytes are others."""
    dice, path, refused = random.Random(1), tmp_path / "run.jsonl", 0
    keys = list(json.loads(recorded[1]))
    for number in range(80):
        lines = list(recorded)
        chosen, value = dice.sample(range(1, len(lines)), dice.choice([1, 1, 12])), dice.choice(FIGURES)
        if number % 4 == 0:
            chosen, key = [0], HEADER[number // 4 % len(HEADER)]
        else:
            key = keys[number % len(keys)]
        for nth in chosen:
            row = {name: json.dumps(figure) for name, figure in json.loads(lines[nth]).items()} | {key: value}
            lines[nth] = "{" + ", ".join(f'"{name}": {figure}' for name, figure in row.items()) + "}"
        content = bytearray("\n".join(lines).encode("utf-8", "surrogatepass"))
        if number % 8 == 3:
            content[dice.randrange(len(content))] = dice.randrange(256)
        elif number % 8 == 5:
            del content[dice.randrange(len(content)) :]
        path.write_bytes(bytes(content) + b"\n")
        refused += bool(ends_well(["--from", path, "--policies", "lb-bsp"], capsys))
    assert 40 < refused < 80, "most are wrong, and some are not"
