"""Listeners that hand the records of a training to other programs.

    balance.on_round(TensorBoard("runs/1"))                         # needs tensorboard
    balance.on_round(PrometheusFile("/var/lib/node_exporter/train.prom"))       # needs prometheus-client

Make them on every rank: only rank 0 opens anything. `figures` is for programs without a listener here.
"""

from hvd_hetero.telemetry.exports.named_numbers import figures
from hvd_hetero.telemetry.exports.prometheus import PrometheusFile
from hvd_hetero.telemetry.exports.tensorboard import TensorBoard

__all__ = ["PrometheusFile", "TensorBoard", "figures"]
