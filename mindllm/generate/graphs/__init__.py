"""The compiled graphs of decoding over a static cache, and their operators in C++ on a CPU."""
