"""Stage 2: prompts -> a real SGLang server -> captured hidden states -> shards."""
