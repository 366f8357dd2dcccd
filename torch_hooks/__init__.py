"""hvd-hetero for PyTorch: three lines change in a Horovod script, and the training loop stays as it is."""

from torch_hooks.evaluation import EvaluationLoader, average_by_samples
from torch_hooks.grad_scaler import GradScaler
from torch_hooks.load_balance import LoadBalance
from torch_hooks.loader import BalancedLoader
from torch_hooks.optimizer import DistributedOptimizer
from torch_hooks.saved import SavedTraining
from torch_hooks.sync_batch_norm import SyncBatchNorm
from torch_hooks.wires.restarts import forget_former_ranks

__all__ = [
    "BalancedLoader",
    "DistributedOptimizer",
    "EvaluationLoader",
    "GradScaler",
    "LoadBalance",
    "SavedTraining",
    "SyncBatchNorm",
    "average_by_samples",
]

forget_former_ranks()  # before the script calls init_process_group()
