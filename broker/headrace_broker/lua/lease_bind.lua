-- Binds a request id that the scripts could not read to the owner's message.
-- ARGV: owner, id, request
-- id: of the lease. Returns {1, stream server of the request or ''}, or {0, ''} if the request id is bound to another
-- message or the owner has lost the lease.
if not owned_list(id, owner) then return {0, ''} end
local holder = holder_of(request)
local record = record_of(id)
if holder then return {holder == id and 1 or 0, holder == id and record and record.at or ''} end
if record then -- missing if keys were deleted by hand
  unbind(id, record)
  record.request, record.at = request, record.at or home_of(request)
  keep(id, record)
end
redis.call('HSET', LEASE_REQUESTS, request, id)
return {1, record and record.at or ''}
