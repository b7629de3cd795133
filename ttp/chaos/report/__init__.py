"""A campaign's result: JSON, one HTML page, pictures, lines on a terminal."""
