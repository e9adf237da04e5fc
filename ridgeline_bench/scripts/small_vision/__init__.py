"""Small towers and tokenizers, trained here on pictures and clips that are drawn."""
