"""An OpenAI-compatible server over the native engine. Needs the extra `serve`; nothing else of posttrain imports it."""
