"""Planning with one chunk per stage: closed forms of the step and a dynamic programme over splits."""
