"""The scoreboard of the field: jobs that make out-of-core tools fail, tool by tool."""
