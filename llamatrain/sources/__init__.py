"""Files that users name by a model in Ollama, a repository on Hugging Face, or an address."""
