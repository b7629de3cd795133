"""Training text as token ids: tokenizers, prepared files, and which sequences each step takes."""
