"""Files, and the fine-tuning jobs over them, in the shapes of the OpenAI API."""
