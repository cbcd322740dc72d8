"""What every trainer of TRL is given that is run beside posttrain."""

from typing import Any

TRL_OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
