"""A script for several ranks also runs as one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch_hooks.trainer import BalancedTrainer  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        output = self.layer(x)[:, 0]
        return {"loss": (output - labels).square().mean(), "logits": output}


def trained(kind, path):
    model = Net()
    data = [{"x": torch.full((3,), i / 10), "labels": torch.tensor(float(i % 3))} for i in range(12)]
    arguments = transformers.TrainingArguments(
        str(path), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", num_train_epochs=2,
        per_device_train_batch_size=3, gradient_accumulation_steps=2,
    )  # fmt: skip
    kind(model, arguments, train_dataset=data).train()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_one_process_trains_as_with_the_trainer_underneath(tmp_path):
    assert torch.equal(trained(BalancedTrainer, tmp_path), trained(transformers.Trainer, tmp_path))
