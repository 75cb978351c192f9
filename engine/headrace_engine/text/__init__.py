"""From text to tokens and back: tokenizers, chat templates, stop strings, and the texts of log-probabilities."""
