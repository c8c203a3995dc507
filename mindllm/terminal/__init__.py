"""Output for people and programs: terminal, tables, pages, JSON and progress."""
