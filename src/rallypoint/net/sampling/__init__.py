"""What members' machines do, and how fast their links are: samples for the page and Prometheus."""
