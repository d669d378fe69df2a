"""Plotly figures and the web pages that show them."""
