"""What a step costs on a given cluster: bytes, seconds, memory, money, what failures take. The planner's arithmetic."""
