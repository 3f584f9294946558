"""The names of rows of results, in addition to their methods."""

from __future__ import annotations

FINETUNE, BASE, BASE_SHOWN, LORA = "fine-tune", "base", "base, 8 examples", "lora"
REFERENCES = (FINETUNE, BASE, BASE_SHOWN)
TASK_TEXTS, BUNDLED = "task", "bundled text"
