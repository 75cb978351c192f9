local LONGEST_HEADERS, LONGEST_TENANT = 256 * 1024, 800

-- Who sent the message; '' where it does not say, or says nonsense. Only what begins with its headers is decoded: the
-- pattern cannot match inside a string of the message, where its quotes would be escaped.
local function tenant_of(body)
  local at = string.find(body, '"headers":', 1, true)
  if not at or #body - at > LONGEST_HEADERS then return '' end
  local readable, tail = pcall(cjson.decode, '{' .. string.sub(body, at))
  local headers = readable and tail.headers
  local tenant = type(headers) == 'table' and headers.tenant
  if type(tenant) ~= 'string' or #tenant > LONGEST_TENANT or string.find(tenant, '%c') then return '' end
  return tenant
end
