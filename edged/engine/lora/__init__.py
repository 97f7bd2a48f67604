"""LoRA updates of many adapters in one packed batch."""
