"""The means of policies: bins, queues, deadlines and the budget of fine-tuning."""
