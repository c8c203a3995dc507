"""Files of GGUF, llama.cpp's format of a model in one file: what their header says, in the words of a Hugging Face directory."""
