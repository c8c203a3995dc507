"""Reports of plans: tables, plain values, pictures and pages."""
