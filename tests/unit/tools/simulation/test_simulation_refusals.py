"""What ``hvd-hetero simulate`` refuses: in one line that names the place, the rule, the value, and what was meant."""

import re
import shlex

import pytest

from hvd_hetero.tools.cli import main

ROUNDS, BATCH, COUNT = "rounds = 40", "global_batch = 60", "count = 2"
FAST, LAST, WORKERS = "samples_per_s = 400", '"elastic-bsp"', "[[workers]]\nsamples_per_s = 400"
DESCRIPTIONS = [
    (ROUNDS, "runds = 40", "did you mean 'rounds'"),
    (ROUNDS, "rounds = ", "no TOML"),
    (ROUNDS, f"{ROUNDS}\nsignal_ms = -3", "training: signal_ms must be at least 0 and at most 1000000000, got -3"),
    ("[training]", "[trainning]", r"needs training \(a table\)"),
    (FAST, "sample_per_s = 400", "workers.1. .*did you mean 'samples_per_s'"),
    (FAST, "samples_per_s = -1", "workers.1.: samples_per_s must be at least .*, got -1"),
    (FAST, f"{FAST}\nslope_ms = 1", "either"),
    (FAST, f"{FAST}\nfixed_ms = -4", "workers.1.: fixed_ms must be at least 0 and at most 1000000000, got -4"),
    (FAST, f"{FAST}\navailability = {{ share = [0.0] }}", "availability: share.0. must be at least .* use a small"),
    (FAST, f"{FAST}\navailability = {{ shares = [1.0] }}", "needs share.*did you mean 'shares'"),
    (FAST, f"{FAST}\nvariation = [{{ kind = 'jiter' }}]", "did you mean 'jitter'"),
    (FAST, f"{FAST}\nsaturation = 0.5", "saturation must be at least 1 .*got 0.5"),
    (FAST, f"{FAST}\n[network]\nbandwidth_mbps = 0", "network: bandwidth_mbps must be at least 1e-06, got 0"),
    (FAST, f"{FAST}\n[network]\nmessage_mb = nan", "network: message_mb must be at least 0 and at most .*, got nan"),
    (COUNT, "count = 0", "count must be at least 1"),
    (COUNT, "count = true", "count must be a whole number, got True"),
    (BATCH, "global_batch = 2", "at least 3 .*got 2; .* for each of 3 workers"),
    (BATCH, "", "needs global_batch"),
    (LAST, '"elastic-bps"', "did you mean 'elastic-bsp'"),
    (LAST, '{ name = "lb-bsp", predictr = "ema" }', "did you mean 'predictor'"),
    (LAST, '{ name = "lb-bsp", predictor = "emma" }', "did you mean 'ema'"),
    (LAST, '"static"', "static needs weights, and has none; write"),
    (LAST, '"self-adaptive"', "dataset = … .* or give the policy every"),
    (LAST, '{ name = "static", weights = [1, 2] }', "weights must name one number per rank"),
    (LAST, '{ name = "bsp", sync = "dpsgd" }', "did you mean 'd-psgd'"),
    (LAST, '{ name = "matcha", sync = "d-psgd" }', "no setting 'sync'"),
    (LAST, '{ name = "elastic-bsp", updates = "local", sync = "matcha" }', "does not go with local updates"),
    (LAST, "7", "policies must hold names"),
]
OPTIONS = [
    ("--policies ''", "--policies must name at least one policy"),
    ("--policies '[{ name = \"matcha\", budgt = 0.5 }]'", "no setting 'budgt'"),
    ("--rounds 0", "--rounds must be at least 1"),
    ("--seed -1", "--seed must be at least 0"),
    ("--global-batch 1", "global_batch must be at least 3 and at most"),
    ("--drop 3", "--drop must name a worker from 0 to 2, got '3'; count from 0"),
    ("--drop -1", "--drop must name a worker from 0 to 2"),
    ("--drop 0,1,2", "--drop must leave a worker.*drop fewer"),
    ("--add seven", "--add must name a worker"),
    ("--add 'sample_per_s = 3'", r"--add.workers\[0\] has no setting 'sample_per_s'"),
    ("--add 'slope_ms = '", "--add is no list of settings"),
    ("--replace 2", "--replace must be \"WORKER: OTHER\", got '2'"),
    ("--replace '9: 0'", "--replace must name a worker"),
    ("--network 'bandwidth_mbps = -1000'", "--network: bandwidth_mbps must be at least .*got -1000"),
    ("--network 'bandwith_mbps = 1000'", "--network has no setting 'bandwith_mbps' .did you mean"),
    ("--worth --drop 1", "--worth looks at the described workers under lb-bsp, and cannot go with --drop"),
    ("--worth --policies bsp", "cannot go with --policies; run the command once for each"),
    ("--worth --drop 0 --drop 1 --add 1", "cannot go with --drop"),
    ("--prices 0=1", "--prices needs --worth; add --worth, or leave --prices out"),
]
ALONE = [  # without a description
    ("", "simulate needs either a description"),
    ("x.toml --from y.jsonl", "simulate needs either a description"),
    ("missing.toml", "missing.toml"),
    ("--from run.jsonl --worth --rounds 9", "recorded rounds, so --rounds has no effect"),
    ("--from run.jsonl --worth --seed 0", "so --seed has no effect; leave it out"),
]


def refused(arguments, said, capsys):
    assert main(["simulate", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert re.fullmatch(f"hvd-hetero: error: [^\n]*{said}[^\n]*\n", error), error


@pytest.mark.parametrize(("old", "new", "said"), DESCRIPTIONS)
def test_a_mistake_in_a_description_is_told(old, new, said, described, capsys):
    refused([str(described((old, new)))], said, capsys)


@pytest.mark.parametrize(("options", "said"), OPTIONS)
def test_a_mistake_in_an_option_is_told(options, said, described, capsys):
    refused([str(described()), *shlex.split(options)], said, capsys)


@pytest.mark.parametrize(("arguments", "said"), ALONE)
def test_a_question_that_cannot_be_is_told(arguments, said, capsys):
    refused(shlex.split(arguments), said, capsys)


def test_a_single_worker_is_not_asked_what_it_is_worth(described, capsys):
    path = described((WORKERS, ""), (COUNT, ""))
    refused([str(path), "--worth"], "worth needs two workers or more, got one; describe or record another one", capsys)
