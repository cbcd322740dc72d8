"""An OpenAI-compatible server over the native engine. Needs the extra `serve`. The dashboard uses its listener."""
