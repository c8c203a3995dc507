"""What a planner says: tables for people, objects for programs, schedules as pictures and pages."""
