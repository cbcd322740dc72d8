"""Agents that run their own loop and reach the model by OpenAI's chat API: `env.<name>.agent`."""
