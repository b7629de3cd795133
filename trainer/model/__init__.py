"""GPT: the model, its weights, and the same in the terms of Hugging Face."""
