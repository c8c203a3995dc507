"""What people and programs are shown: the terminal, tables, pages, JSON, and progress."""
