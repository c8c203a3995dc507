"""Building of an indexed corpus and its tokenizer from text files, source trees and records; and a view of its samples."""
