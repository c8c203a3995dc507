"""Conversations: their files, the chat templates that write them out, and rows and pairs of them as samples."""
