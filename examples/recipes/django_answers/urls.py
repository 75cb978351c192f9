from django.urls import path

from . import views

urlpatterns = [
    path("answers", views.ask),
    path("answers/<uuid:answer_id>", views.show),
    path("answers/<uuid:answer_id>/stream", views.stream),
]
