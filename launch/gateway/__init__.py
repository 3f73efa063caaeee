"""Models over HTTP, for clients of OpenAI's and Anthropic's APIs."""
