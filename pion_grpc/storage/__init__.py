"""Keys, rows and bytes on disk. Knows neither what tokens mean nor what models are."""
