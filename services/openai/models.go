package openai

import (
	"net/http"

	"bulkhead.dev/services/httpx"
	"bulkhead.dev/tenancy"
)

type modelObject struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

type modelList struct {
	Object string        `json:"object"`
	Data   []modelObject `json:"data"`
}

func objectOf(m tenancy.Model) modelObject {
	return modelObject{ID: m.Name, Object: "model", Created: m.Created.Unix(), OwnedBy: "bulkhead"}
}

func (s *server) models(w http.ResponseWriter, r *http.Request) error {
	p := httpx.InfoFrom(r.Context()).Principal
	if err := p.Require(tenancy.ScopeInference); err != nil {
		return err
	}
	list, err := s.Backend.Models(r.Context(), p)
	if err != nil {
		return err
	}
	out := modelList{Object: "list", Data: []modelObject{}}
	for _, m := range list {
		out.Data = append(out.Data, objectOf(m))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (s *server) model(w http.ResponseWriter, r *http.Request) error {
	p := httpx.InfoFrom(r.Context()).Principal
	if err := p.Require(tenancy.ScopeInference); err != nil {
		return err
	}
	m, err := s.Backend.Model(r.Context(), p, r.PathValue("id"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, objectOf(m))
	return nil
}
