"""Text to tokens and back: tokenizer, detokenizer, chat templates, prompt files."""
