"""What happens to a simulated job: orders, resumes, links that change; and what a run that failed says."""
